/** Expected labels: the confusion of a request's labels, and how good a threshold is. Pure functions. */

/** One label per line, in the order of the items; an empty line for an item without one. */
export function expectedOf(text) {
  return text.trim() === "" ? [] : text.trimEnd().split("\n").map((line) => line.trim());
}

/** The label with the highest score; null for a row without scores, or where a row has one score only. */
export function predicted(answer, row) {
  if (row.judgement) return row.judgement.answer.trim();
  if (!row.values || answer.columns.length < 2) return null;
  return answer.columns[row.values.indexOf(Math.max(...row.values))].trim();
}

/**
 * `{names, columns, counts, numRight, total}` over the items with an expected label: rows are expected labels, columns
 * predicted ones. Null if no item has both.
 */
export function confusionOf(answer, expected) {
  const pairs = answer.rows.map((row) => [expected[row.index], predicted(answer, row)]).filter(([a, b]) => a && b);
  if (!pairs.length) return null;
  const columns = (answer.labels ?? answer.columns).map((name) => name.trim());
  const names = [...new Set([...columns, ...pairs.map(([name]) => name)])];
  const counts = names.map((name) => columns.map((column) => pairs.filter(([a, b]) => a === name && b === column).length));
  return { names, columns, counts, numRight: pairs.filter(([a, b]) => a === b).length, total: pairs.length };
}

/** The label that a score at or above the threshold stands for; "" for expected values, which stand for none. */
export function positiveLabel(answer) {
  if (answer.range) return "";
  return (answer.labels?.[0] ?? answer.request.body.labels?.[0] ?? "relevant").trim();
}

/** `{above, below, right, precision, recall, f1}` of the first column; the last four are null without expected labels. */
export function countsAt(answer, expected, threshold) {
  const scored = answer.rows.filter((row) => row.values);
  const above = scored.filter((row) => row.values[0] >= threshold);
  const isPositive = (row) => expected[row.index] === positiveLabel(answer);
  const known = positiveLabel(answer) ? scored.filter((row) => expected[row.index]) : [];
  const numFound = above.filter(isPositive).length;
  const numKnownAbove = above.filter((row) => expected[row.index]).length;
  const numPositive = known.filter(isPositive).length;
  const counts = { above: above.length, below: scored.length - above.length };
  if (!known.length) return { ...counts, right: null, precision: null, recall: null, f1: null };
  return {
    ...counts,
    right: (known.length - numPositive - numKnownAbove + 2 * numFound) / known.length,
    ...ratios(numFound, numKnownAbove, numPositive),
  };
}

function ratios(numFound, numAbove, numPositive) {
  const ratio = (part, whole) => (whole ? part / whole : 0);
  return {
    precision: ratio(numFound, numAbove), recall: ratio(numFound, numPositive),
    f1: ratio(2 * numFound, numAbove + numPositive),
  };
}

/** The threshold with the highest F1, in the middle between two scores; null without items of the positive label. */
export function bestThreshold(answer, expected) {
  const rows = answer.rows.filter((row) => row.values && expected[row.index]).sort((a, b) => b.values[0] - a.values[0]);
  const isPositive = (row) => expected[row.index] === positiveLabel(answer);
  const numPositive = rows.filter(isPositive).length;
  let best = null;
  let numFound = 0;
  rows.forEach((row, at) => {
    numFound += isPositive(row) ? 1 : 0;
    const [value, next] = [row.values[0], rows[at + 1]?.values[0]];
    if (value === next) return;
    const { f1 } = ratios(numFound, at + 1, numPositive);
    if (f1 > (best?.f1 ?? 0)) best = { f1, threshold: next === undefined ? value : (value + next) / 2 };
  });
  return best;
}
