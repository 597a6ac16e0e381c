/** Example requests. Each is a state; missing fields have their defaults. */
export const EXAMPLES = [
  {
    name: "Is it food?",
    state: {
      query: "Is this about food? Answer yes or no.\n\nText: ",
      items: "a pizza with mushrooms\nthe law of income taxes\nfreshly baked bread\na bicycle with two flat tires\nlentil soup",
      labels: " yes\n no",
      suffix: "\nAnswer:",
    },
  },
  {
    name: "Rerank passages",
    state: {
      task: "rerank",
      query: "What is the capital of France?",
      items: "Berlin is the capital of Germany.\nParis is the capital of France.\nFrance is known for its cheese.\n"
        + "The Seine flows through Paris.",
    },
  },
  {
    name: "Mood of reviews",
    state: {
      query: "Review: ",
      items: "I could not put it down.\nThe battery died after a day.\nIt does what it says, no more.\nA waste of money.",
      labels: " positive\n negative\n neutral",
      suffix: "\nThe mood of this review is",
      scoreMode: "softmax",
    },
  },
  {
    name: "Item first",
    state: {
      query: "\nIs the text above a question? Answer:",
      items: "Where is the station?\nThe station is over there.\nWho knows?",
      labels: " Yes\n No",
      itemFirst: true,
    },
  },
];
