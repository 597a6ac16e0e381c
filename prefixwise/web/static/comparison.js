/** "Compare": the same items with two prompts or two label sets, side by side. */
import { ApiError, send } from "./api.js";
import { ranked, readAnswer } from "./answer.js";
import { counted, element, shortNumber, table } from "./dom.js";
import { confusionOf } from "./expected.js";
import { OTHER_FIELDS } from "./state.js";

const MAX_ROWS = 200; // in the table

let last = { body: "", answer: null }; // B's answer, until something else is asked

/** The state with the fields of B in the place of A's. */
export function otherState(state) {
  return { ...state, ...Object.fromEntries(Object.entries(OTHER_FIELDS).map(([name, own]) => [own, state[name]])) };
}

/** Score B and show it beside A. An error of B's request is shown here: the form has A's. */
export async function showComparison(place, answer, request, expected, signal) {
  try {
    const other = await answerOf(request, place, signal);
    place.replaceChildren(...report(answer, other, expected));
  } catch (error) {
    if (!(error instanceof ApiError) || error.param === "api_key") throw error;
    place.replaceChildren(element("p", { class: "error" }, `B: ${error.message}`));
  } finally {
    place.removeAttribute("aria-busy");
  }
}

async function answerOf(request, place, signal) {
  const body = request.path + JSON.stringify(request.body);
  if (last.body !== body) {
    place.setAttribute("aria-busy", "true");
    last = { body, answer: readAnswer(request, await send(request, signal)) };
  }
  return last.answer;
}

/** The items with a score in both answers: `{text, rankA, rankB, a, b}`, by A's rank. */
export function pairs(answer, other) {
  const second = new Map(ranked(other).map((row) => [row.index, row]));
  return ranked(answer).map((row) => ({ row, twin: second.get(row.index) }))
    .filter(({ row, twin }) => row.values && twin?.values)
    .map(({ row, twin }) => ({ text: row.text, rankA: row.rank, rankB: twin.rank, a: row.values[0], b: twin.values[0] }));
}

function report(answer, other, expected) {
  const found = pairs(answer, other);
  if (!found.length) return [element("p", { class: "faint" }, "No item has a score in both.")];
  const shown = found.length > MAX_ROWS ? byDifference(found).slice(0, MAX_ROWS) : found;
  const caption = shown.length < found.length
    ? `The ${MAX_ROWS} of ${counted(found.length, "item")} whose scores differ most` : "Items by A's rank";
  const header = ["item", "rank A → B", `A (${answer.columns[0].trim()}) → B (${other.columns[0].trim()})`, "B − A"];
  const rows = shown.map(({ text, rankA, rankB, a, b }) => [text || "(empty)",
    parts(`${rankA} → ${rankB}`, change(rankA - rankB)), parts(`${shortNumber(a)} →`, shortNumber(b)), b - a]);
  return [
    element("p", { id: "compared" }, summary(found)),
    ...rightOf(answer, other, expected),
    table(caption, header, rows, { hasRowHeaders: true }),
  ];
}

const byDifference = (rows) => [...rows].sort((x, y) => Math.abs(y.b - y.a) - Math.abs(x.b - x.a));

/** A cell whose parts stand below each other where there is little room. */
const parts = (first, second) => element("div", { class: "parts" }, element("span", {}, first), " ",
  element("span", {}, second));

function change(places) {
  if (places === 0) return element("span", { class: "faint" }, "same");
  return element("span", { class: places > 0 ? "good" : "bad" }, places > 0 ? `up ${places}` : `down ${-places}`);
}

function summary(found) {
  const numMoved = found.filter(({ rankA, rankB }) => rankA !== rankB).length;
  const sizes = found.map(({ a, b }) => Math.abs(b - a));
  const mean = sizes.reduce((sum, size) => sum + size, 0) / sizes.length;
  const largest = sizes.reduce((most, size) => Math.max(most, size), 0);
  return `${numMoved} of ${counted(found.length, "item")} change their rank. The first score differs by `
    + `${shortNumber(mean)} on average, by ${shortNumber(largest)} at most.`;
}

/** With expected labels: how many each gets right. A label that B does not have is B's in the same place. */
function rightOf(answer, other, expected) {
  const [ours, theirs] = [answer, other].map(({ columns }) => columns.map((name) => name.trim()));
  const translated = expected.map((name) => (theirs.includes(name) ? name : theirs[ours.indexOf(name)] ?? name));
  const [a, b] = [confusionOf(answer, expected), confusionOf(other, translated)];
  if (!a || !b) return [];
  return [element("p", {}, `Expected labels: A gets ${a.numRight} of ${a.total} right, B ${b.numRight} of ${b.total}.`)];
}
