/**
 * Example requests. Each is a state; missing fields have their defaults. The embedded model, SmolLM2 with 135 million
 * parameters, gets all of them right, in float32 and in bfloat16.
 */
const REVIEWS = {
  query: "Review: ",
  items: "I loved every minute of it.\nThe food was cold and the waiter was rude.\nBest purchase I have made this year!\n"
    + "It broke after two days.\nWonderful service, friendly people.\nA complete waste of money.\n"
    + "I could not put it down.\nThe battery died after a day.",
  expected: "positive\nnegative\npositive\nnegative\npositive\nnegative\npositive\nnegative",
  labels: " positive\n negative",
  suffix: " Sentiment:",
};

export const EXAMPLES = [
  { name: "Mood of reviews", state: REVIEWS },
  {
    name: "Topic of headlines",
    state: {
      query: "Headline: ",
      items: "The team won the final in overtime\nParliament votes on the new budget\nFive soups for cold evenings\n"
        + "The striker signs for three years\nHow to bake bread at home\nThe president meets the opposition",
      expected: "sports\npolitics\nfood\nsports\nfood\npolitics",
      labels: " sports\n politics\n food",
      suffix: "\nThis headline is about",
    },
  },
  {
    name: "Rude comments",
    state: {
      query: "Comment: ",
      items: "You are an idiot and nobody likes you.\nThanks for the explanation, it helped me a lot.\n"
        + "Shut up, you stupid moron.\nI disagree, but I see your point.\nWhat a great photo!\nGo away, loser.",
      expected: "rude\npolite\nrude\npolite\npolite\nrude",
      labels: " rude\n polite",
      suffix: "\nThis comment is",
    },
  },
  {
    name: "Rerank passages",
    state: {
      task: "rerank",
      query: "How do I reset my password?",
      items: "Our office is open from nine to five.\nTo reset your password, open Settings and choose Reset password.\n"
        + "Invoices are sent by e-mail at the end of the month.\nA strong password has at least twelve characters.",
    },
  },
  {
    name: "Judge replies",
    state: {
      task: "judge",
      query: "How does this reply to a customer sound?\n\nReply: ",
      items: "You are an idiot for asking this.\nWhat a dumb question.\nWe told you this before.\n"
        + "Thanks for writing. It ships on Monday.\nThank you for your patience! I am happy to help you with this.\n"
        + "I am so sorry about this. We will send a new one today, free of charge.",
      expected: "insulting\ninsulting\ninsulting\npolite\npolite\npolite",
      prefill: "This reply is",
      labels: " insulting\n rude\n neutral\n polite\n very kind",
      values: "1 2 3 4 5",
      tab: "distribution",
    },
  },
  {
    name: "Item first",
    state: {
      query: "\n(This text is written in",
      items: "Where is the station?\nWo ist der Bahnhof?\nOù est la gare ?\n¿Dónde está la estación?\n"
        + "The train is late.\nDer Zug hat Verspätung.\nLe train est en retard.\nEl tren llega tarde.",
      expected: "English\nGerman\nFrench\nSpanish\nEnglish\nGerman\nFrench\nSpanish",
      labels: " English\n German\n French\n Spanish",
      itemFirst: true,
    },
  },
  {
    name: "Two prompts",
    state: {
      ...REVIEWS,
      tab: "compare",
      compares: true,
      otherQuery: REVIEWS.query,
      otherLabels: " great\n terrible",
      otherSuffix: " This was",
    },
  },
];

/** The example that the page opens with: one that the model can answer. Empty for a classifier that cannot rerank. */
export function openingExample({ model, profiles }) {
  const isReranker = model.num_classes ? profiles.default !== null : profiles.warning === null;
  if (isReranker) return EXAMPLES.find(({ state }) => state.task === "rerank").state;
  return model.num_classes ? {} : REVIEWS;
}
