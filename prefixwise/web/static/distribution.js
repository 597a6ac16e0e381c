/** "Distribution": the probabilities of all labels or answers for the chosen item, and what a judge makes of them. */
import { bar, element, shortNumber, table } from "./dom.js";

/** Fill the panel. */
export function showDistribution(panel, answer, row) {
  const { judgement } = row;
  if (!judgement && !answer.isShare) {
    panel.replaceChildren(element("p", { class: "faint" }, "The scores of this mode are not probabilities."));
    return;
  }
  const names = answer.labels ?? answer.columns;
  const probs = judgement?.probs ?? row.values;
  const rows = names.map((name, i) => [name.trim() || "(blank)", probs[i], bar(probs[i])]);
  const caption = judgement ? "Probability of each answer" : "Score of each label";
  panel.replaceChildren(
    ...(judgement ? [summary(judgement)] : []),
    table(caption, [judgement ? "answer" : "label", "probability", ""], rows, { hasRowHeaders: true }),
  );
}

function summary({ answer, expected_value: expected, entropy, mass }) {
  const mean = expected === null ? "" : ` The expected value is ${shortNumber(expected)}.`;
  return element("p", { id: "judged" }, "Most likely: ", element("strong", {}, answer.trim()), `.${mean} The entropy is `
    + `${shortNumber(entropy)} bits. The model gives one of these answers with a probability of ${shortNumber(mass)}.`);
}
