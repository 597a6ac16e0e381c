/** "Isolation": who sees whom, and the proof that changing one item moves no other. */
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
  const words = element("div", {},
    element("p", {}, `Rows are tokens that look, columns are tokens that are seen: ${layoutWords(answer)}${scaled}`),
    legend(layout, row.index < numItems), element("p", {}, button));
  panel.replaceChildren(element("div", { class: "beside" }, picture, words), outcome);
  if (answer.rows.length < 2) outcome.append(element("p", { class: "faint" }, "This takes at least two items."));
}

function layoutWords({ debug }) {
  const shared = "every item sees the shared prefix (blue) and itself (orange), and no other item.";
  const { layout, algorithm } = debug;
  if (!layout.prefix_tokens) return "nothing is shared; every item sees itself (orange), and no other item.";
  if (algorithm === "serial") return `${algorithm} computes the prefix again for every item; ${shared}`;
  if (algorithm === "packed") return `${algorithm} puts items behind one prefix in a row; ${shared}`;
  return `${algorithm} computes the prefix once and keeps it; ${shared}`;
}

function legend(layout, isDrawn) {
  const entries = [
    ...(layout.prefix_tokens ? [["seen", "the shared prefix"]] : []),
    ["own", "an item’s own tokens"],
    ...(isDrawn ? [["this", "those of the chosen item"]] : []),
  ];
  return element("ul", { class: "legend" },
    ...entries.map(([kind, words]) => element("li", {}, element("span", { class: `key ${kind}` }), words)));
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
  if (!before || !after) return "nothing that can be told";
  return Math.max(...before.map((value, i) => Math.abs(value - after[i])));
}

const exact = (value) => (value === undefined ? "–" : String(value));
