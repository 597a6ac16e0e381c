/** "What the model saw": the tokens of the chosen item, the scored position, and the most likely next tokens. */
import { send } from "./api.js";
import { readAnswer } from "./answer.js";
import { bar, counted, element, shortNumber, table } from "./dom.js";
import { withFields, withItems } from "./request.js";

const TOP_TOKENS = 12;
const MAX_CHIPS = 600; // of a long prompt the middle is left out

/** Ask about one row of an answer, alone; fill the panel. */
export async function showWhatWasSeen(panel, answer, row, signal) {
  panel.setAttribute("aria-busy", "true"); // the old content stays until the new one is there: the layout does not jump
  if (!panel.querySelector(".chips")) panel.replaceChildren(element("p", { class: "faint" }, "Loading…"));
  const request = withFields(withItems(answer.request, [row.text]), { return_debug: true, debug_top_k: TOP_TOKENS });
  const alone = readAnswer(request, await send(request, signal));
  const seen = alone.debug.item;
  panel.removeAttribute("aria-busy");
  panel.replaceChildren(
    legend(seen),
    element("ol", { class: "chips", "aria-label": "Tokens" }, ...chips(seen)),
    element("h3", {}, "Most likely next tokens"),
    topTable(seen.top, answer.labels ?? answer.request.body.labels ?? []),
    sameScore(row, alone.rows[0]),
  );
}

function legend(seen) {
  const own = seen.tokens.length - seen.prefix_tokens;
  return element("p", {}, element("span", { class: "key prefix" }),
    `${counted(seen.prefix_tokens, "token")} of the shared prefix, `, `${own} of this item, `,
    element("span", { class: "key scored" }), `scored after position ${seen.scored_position}.`);
}

function chips(seen) {
  const made = seen.tokens.map((token, position) => chip(token, position, seen));
  if (made.length <= MAX_CHIPS) return made;
  const half = MAX_CHIPS / 2;
  const gap = element("li", { class: "gap" }, `${made.length - MAX_CHIPS} more`);
  return [...made.slice(0, half), gap, ...made.slice(-half)];
}

function chip(token, position, seen) {
  const isScored = position === seen.scored_position;
  const kind = isScored ? "scored" : position < seen.prefix_tokens ? "prefix" : "own";
  const node = element("li", { class: kind, title: `position ${position}, token ${token.id}` }, visible(token));
  if (isScored) node.append(element("span", { class: "visually-hidden" }, " (scored here)"));
  return node;
}

/** A token with visible spaces and line breaks. */
export function visible({ id, text }) {
  if (text === null) return String(id);
  return text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || `#${id}`;
}

function topTable(top, labels) {
  if (!top.length) return element("p", {}, "This model is a classifier and predicts no next tokens.");
  const rows = top.map((token) => {
    const name = element("span", {}, element("code", {}, visible(token)), ...labelBadge(token.text, labels));
    return [name, token.prob, bar(token.prob)];
  });
  return table("By probability over the whole vocabulary", ["token", "probability", ""], rows);
}

/** A token that is only a space begins every label and gets no badge. */
function labelBadge(text, labels) {
  if (!text?.trim() || !labels.some((label) => label.startsWith(text))) return [];
  return [element("span", { class: "badge" }, labels.includes(text) ? "label" : "begins a label")];
}

function sameScore(row, alone) {
  const moved = Math.max(...row.values.map((value, i) => Math.abs(value - alone.values[i])));
  const verdict = moved === 0
    ? "Scored alone for this panel, the item got exactly the scores that it has in the list."
    : `Scored alone for this panel, the item's scores differ from those in the list by ${shortNumber(moved)}.`;
  return element("p", { class: moved === 0 ? "good" : "bad" }, verdict);
}
