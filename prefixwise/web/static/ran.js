/** "How it ran": algorithm, reason, batches and times; compares all three algorithms on demand. */
import { readAnswer } from "./answer.js";
import { send } from "./api.js";
import { counted, element, shortNumber, table } from "./dom.js";
import { withFields } from "./request.js";

const SPANS = ["tokenize", "queue", "prefill", "extend", "host"];
const MAX_BATCHES = 50; // in the table
const ALGORITHMS = ["prefill_extend", "packed", "serial"];

/** Fill the panel. `ask`: runs something that may fail, with a signal. */
export function showHowItRan(panel, answer, ask) {
  const compared = element("div", { role: "status" });
  const button = element("button", { type: "button", id: "compare" }, "Run all three algorithms");
  button.addEventListener("click", () => ask(compared, (signal) => compare(answer, compared, signal)));
  panel.replaceChildren(...described(answer.debug, answer.usage), element("p", {}, button), compared);
}

function described(debug, usage) {
  const shown = debug.batches.slice(0, MAX_BATCHES);
  const caption = shown.length < debug.batches.length ? `The first ${shown.length} batches` : "Batches";
  const fill = table(caption, ["segments", "tokens", "tokens of the forward", "padded to", "filled"],
    shown.map((batch) => (
      [batch.segments, batch.num_tokens, batch.forward_tokens, batch.bucket, `${(100 * batch.fill).toFixed(1)} %`])));
  return [
    element("p", {}, element("strong", {}, debug.algorithm), ` – ${debug.reason}.`),
    ...timeline(debug.milliseconds, total(debug.milliseconds)),
    element("p", {}, `${debug.batches.length} ${debug.batches.length === 1 ? "batch" : "batches"}; ${counted(usage.prompt_tokens, "token")}, of which `
      + `${debug.cached_tokens.toLocaleString("en")} prefix tokens were cached (prefix cache hit).`),
    fill,
  ];
}

const total = (milliseconds) => SPANS.reduce((sum, name) => sum + milliseconds[name], 0);

/** A timeline of `whole` milliseconds, and its legend. */
function timeline(milliseconds, whole) {
  const parts = SPANS.map((name) => {
    const part = element("span", { class: `span-${name}`, title: `${name} ${shortNumber(milliseconds[name])} ms` });
    part.style.width = `${(100 * milliseconds[name]) / whole}%`;
    return part;
  });
  const items = SPANS.map((name) => element("li", {}, element("span", { class: `key span-${name}` }),
    `${name} ${milliseconds[name].toFixed(2)} ms`));
  return [
    element("div", { class: "timeline", "aria-hidden": "true" }, ...parts),
    element("ul", { class: "legend" }, ...items, element("li", {}, `total ${total(milliseconds).toFixed(2)} ms`)),
  ];
}

async function compare(answer, place, signal) {
  place.replaceChildren(element("p", { class: "faint" }, "Running…"));
  const results = [];
  for (const algorithm of ALGORITHMS) {
    const request = withFields(answer.request, { algorithm, return_debug: true });
    results.push(readAnswer(request, await send(request, signal)));
  }
  const slowest = Math.max(...results.map(({ debug }) => total(debug.milliseconds)));
  place.replaceChildren(
    ...results.flatMap(({ debug }, i) => [
      element("h3", {}, ALGORITHMS[i]), ...timeline(debug.milliseconds, slowest),
    ]),
    table("Side by side", ["algorithm", "milliseconds", "batches", "cached tokens", "largest score difference"],
      results.map((result, i) => [ALGORITHMS[i], total(result.debug.milliseconds), result.debug.batches.length,
        result.debug.cached_tokens, largestDifference(results[0], result)])),
  );
}

function largestDifference(first, second) {
  let largest = 0;
  first.rows.forEach(({ values }, row) => values?.forEach((value, column) => {
    largest = Math.max(largest, Math.abs(value - second.rows[row].values[column]));
  }));
  return largest;
}
