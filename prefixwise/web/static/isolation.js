/** "Isolation": the attention mask, and a test that changing one item changes no other item's score. */
import { readAnswer } from "./answer.js";
import { send } from "./api.js";
import { element, table } from "./dom.js";
import { layoutPicture } from "./layout_picture.js";
import { itemName, itemsOf, withItems } from "./request.js";

const OTHER_TEXT = "Something else entirely, and of another length.";

/** Draw the layout, and offer the experiment. `ask`: runs something that may fail, with a signal. */
export function showIsolation(panel, answer, row, ask) {
  const layout = answer.debug.layout;
  const { picture, numItems } = layoutPicture(layout, row.index);
  const outcome = element("div", { role: "status" });
  const button = element("button", { type: "button", id: "perturb" }, "Change another item and score again");
  button.disabled = answer.rows.length < 2;
  button.addEventListener("click", () => ask(outcome, (signal) => perturb(answer, row, outcome, signal)));
  const total = layout.segments / layout.segments_per_item;
  const absent = row.index < numItems ? "" : "; this one is not among them";
  const scaled = numItems < total
    ? ` The first ${numItems} of ${total.toLocaleString("en")} items are drawn${absent}.` : "";
  const text = element("div", {},
    element("p", {}, `Rows are query tokens, columns are key tokens: ${layoutText(answer)}${scaled}`),
    legend(layout, row.index < numItems), element("p", {}, button));
  panel.replaceChildren(element("div", { class: "beside" }, picture, text), outcome);
  if (answer.rows.length < 2) outcome.append(element("p", { class: "faint" }, "At least two items are needed."));
}

function layoutText({ debug }) {
  const shared = "every item attends to the shared prefix (blue) and to itself (orange), and to no other item.";
  const { layout, algorithm } = debug;
  if (!layout.prefix_tokens) return "there is no shared prefix; every item attends to itself (orange), and to no other item.";
  if (algorithm === "serial") return `${algorithm} computes the prefix again for every item; ${shared}`;
  if (algorithm === "packed") return `${algorithm} packs the prefix and its items into one sequence; ${shared}`;
  return `${algorithm} computes the prefix once and caches its keys and values; ${shared}`;
}

function legend(layout, isDrawn) {
  const entries = [
    ...(layout.prefix_tokens ? [["seen", "the shared prefix"]] : []),
    ["own", "an item’s tokens (self-attention)"],
    ...(isDrawn ? [["this", "the chosen item"]] : []),
  ];
  return element("ul", { class: "legend" },
    ...entries.map(([kind, text]) => element("li", {}, element("span", { class: `key ${kind}` }), text)));
}

async function perturb(answer, row, outcome, signal) {
  outcome.replaceChildren(element("p", { class: "faint" }, "Scoring again…"));
  const other = row.index === 0 ? 1 : row.index - 1;
  const items = [...itemsOf(answer.request)];
  items[other] = items[other] === OTHER_TEXT ? `${OTHER_TEXT} Again.` : OTHER_TEXT;
  const request = withItems(answer.request, items);
  const again = readAnswer(request, await send({ ...request, body: { ...request.body, return_debug: true } }, signal));
  outcome.replaceChildren(...report(answer, again, row.index, other));
}

function report(before, after, own, other) {
  const moved = (index) => difference(before.rows[index].values, after.rows[index].values);
  const isStill = moved(own) === 0;
  const rows = [own, other].flatMap((index) => before.columns.map((name, column) => [
    index === own ? "this item" : `${itemName(before.request, other)}, changed`,
    name.trim(),
    exact(before.rows[index].values?.[column]),
    exact(after.rows[index].values?.[column]),
  ]));
  return [
    element("p", { class: `verdict-line ${isStill ? "good" : "bad"}`, id: "moved" },
      `${itemName(before.request, other)} was replaced. This item's score moved by exactly ${moved(own)}; the changed one's by ${moved(other)}.`),
    table("Scores before and after, to the last digit", ["item", "value", "before", "after"], rows),
  ];
}

function difference(before, after) {
  if (!before || !after) return "an unknown amount";
  return Math.max(...before.map((value, i) => Math.abs(value - after[i])));
}

const exact = (value) => (value === undefined ? "–" : String(value));
