/** "Threshold": a histogram of the scores, a threshold with its counts, and the confusion of expected labels. */
import { scoreRange } from "./answer.js";
import { counted, element, shortNumber, table } from "./dom.js";
import { bestThreshold, confusionOf, countsAt, positiveLabel } from "./expected.js";

const NUM_BINS = 20;
const NUM_STEPS = 200; // of the slider

/**
 * Fill the panel.
 * @param expected the expected labels, by item; may be empty
 * @param chosen the threshold of the state, as text; "" is the middle of the range
 * @param onChoose called with the new threshold, as text
 */
export function showThreshold(panel, answer, expected, chosen, onChoose) {
  const [low, high] = scoreRange(answer);
  const slider = element("input", { type: "range", id: "threshold", min: low, max: high, step: "any" });
  const number = element("output", { for: "threshold", class: "figure" });
  const histogram = element("div", { class: "histogram", role: "img" });
  const counts = element("div", { role: "status", id: "threshold-counts" });

  function draw(value) {
    number.textContent = shortNumber(value);
    drawHistogram(histogram, answer, [low, high], value);
    counts.replaceChildren(...countLines(answer, countsAt(answer, expected, value)));
  }

  function choose(value) {
    slider.value = String(value);
    draw(Number(slider.value));
    onChoose(shortText(Number(slider.value)));
  }

  slider.addEventListener("input", () => choose(Number(slider.value)));
  slider.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
    if (!step) return;
    event.preventDefault(); // a slider without steps of its own moves by a tenth
    choose(Number(slider.value) + (step * (high - low)) / NUM_STEPS);
  });
  slider.value = chosen === "" ? String((low + high) / 2) : chosen;
  panel.replaceChildren(
    element("p", {}, `How many items score at least the threshold for “${answer.columns[0].trim()}”.`),
    histogram,
    element("div", { class: "axis", "aria-hidden": "true" }, element("span", {}, shortNumber(low)),
      element("span", {}, shortNumber(high))),
    element("p", { class: "slider-line" }, element("label", { for: "threshold" }, "Threshold"), slider, number),
    counts, ...suggestion(bestThreshold(answer, expected), choose), ...confusion(confusionOf(answer, expected)),
  );
  draw(Number(slider.value));
}

const shortText = (value) => String(Number(value.toPrecision(6)));

function drawHistogram(place, answer, [low, high], threshold) {
  const bins = Array(NUM_BINS).fill(0);
  const width = (high - low) / NUM_BINS || 1;
  for (const { values } of answer.rows) {
    if (values) bins[Math.min(NUM_BINS - 1, Math.max(0, Math.floor((values[0] - low) / width)))] += 1;
  }
  const most = Math.max(1, ...bins);
  const bars = bins.map((count, bin) => {
    const node = element("span", { class: low + (bin + 0.5) * width >= threshold ? "above" : "below",
      title: `${shortNumber(low + bin * width)} to ${shortNumber(low + (bin + 1) * width)}: ${counted(count, "item")}` });
    node.style.height = `${(100 * count) / most}%`;
    return node;
  });
  const line = element("span", { class: "threshold-line" });
  line.style.left = `${(100 * (threshold - low)) / (high - low || 1)}%`;
  place.setAttribute("aria-label", `Histogram of ${counted(answer.rows.length, "score")} from ${shortNumber(low)} to `
    + `${shortNumber(high)}: ${bins.join(", ")} items in ${NUM_BINS} bins.`);
  place.replaceChildren(...bars, line);
}

function countLines(answer, counts) {
  const total = counts.above + counts.below || 1;
  const share = (count) => `${((100 * count) / total).toFixed(0)} %`;
  const lines = [element("p", {}, element("strong", {}, `${counted(counts.above, "item")} at or above`),
    ` (${share(counts.above)}), ${counts.below.toLocaleString("en")} below (${share(counts.below)}).`)];
  if (counts.right === null) return lines;
  return [...lines, element("p", {}, `Against the expected labels, with “${positiveLabel(answer)}” at or above: precision `
    + `${shortNumber(counts.precision)}, recall ${shortNumber(counts.recall)}, F1 ${shortNumber(counts.f1)}, `
    + `${(100 * counts.right).toFixed(0)} % right.`)];
}

function suggestion(best, choose) {
  if (best === null) return [];
  const text = `Use ${shortNumber(best.threshold)}, the threshold with the best F1 (${shortNumber(best.f1)})`;
  return [element("p", {}, element("button", { type: "button", id: "best-threshold", onclick: () => choose(best.threshold) },
    text))];
}

function confusion(found) {
  if (found === null) {
    return [element("p", { class: "hint" }, "With expected labels (in the form, below the items) this panel also shows "
      + "precision, recall and a confusion table.")];
  }
  const header = ["expected", ...found.columns.map((name) => `predicted ${name}`)];
  const rows = found.names.map((name, row) => [name, ...found.counts[row]]);
  const share = `${found.numRight} of ${found.total} items get their expected label`;
  return [table(`Confusion of the highest-scoring label: ${share}`, header, rows, { hasRowHeaders: true })];
}
