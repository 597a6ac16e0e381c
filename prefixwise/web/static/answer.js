/** A response in one form for scoring and reranking; sorted, filtered, and as a file. */
import { itemsOf } from "./request.js";

const FROM_0_TO_1 = ["softmax", "prob", "sigmoid"];

/**
 * `{columns, rows, debug, usage, notes, isShare}`. A row is `{index, text, values, error}`; `values` are in the
 * order of the columns, null where there is an error. `isShare`: are all values from 0 to 1? Of a judge also `labels`,
 * the answers, and `range`, of the expected value (`mean`), which is the first column then; a row has its `judgement`.
 */
export function readAnswer(request, answer) {
  if (answer.object === "judge") return readJudge(request, answer);
  return "results" in answer ? readRerank(request, answer) : readScores(request, answer);
}

function readScores(request, answer) {
  const errors = new Map((answer.item_errors ?? []).map((error) => [error.index, error.message]));
  const rows = itemsOf(request).map((text, index) => (
    { index, text, values: answer.scores[index], error: errors.get(index) ?? null }
  ));
  const width = rows.find((row) => row.values)?.values.length ?? 1;
  const labels = request.body.labels;
  return {
    request,
    columns: width === labels.length ? labels : [request.body.score_mode],
    rows,
    debug: answer.debug,
    usage: answer.usage,
    notes: [],
    isShare: FROM_0_TO_1.includes(request.body.score_mode),
  };
}

function readRerank(request, answer) {
  const rows = itemsOf(request).map((text, index) => ({ index, text, values: null, error: null }));
  for (const { index, relevance_score: score } of answer.results) rows[index].values = [score];
  return {
    request,
    columns: ["relevance"],
    rows,
    debug: answer.meta.debug,
    usage: answer.usage,
    notes: answer.meta.warnings ?? [],
    isShare: true,
  };
}

function readJudge(request, answer) {
  const labels = answer.answers;
  const hasValues = answer.results[0].expected_value !== null;
  const values = request.body.values ?? labels.map(Number);
  return {
    request,
    labels,
    columns: hasValues ? ["mean", ...labels] : labels,
    range: hasValues ? [Math.min(...values), Math.max(...values)] : null,
    rows: itemsOf(request).map((text, index) => {
      const judgement = answer.results[index];
      const { probs, expected_value: expected } = judgement;
      return { index, text, values: hasValues ? [expected, ...probs] : probs, error: null, judgement };
    }),
    debug: answer.debug,
    usage: answer.usage,
    notes: answer.warnings ?? [],
    isShare: !hasValues,
  };
}

/** The rows to be shown. `sort`: "COLUMN-down", "COLUMN-up" or "order"; each row gets its rank by the first column. */
export function arranged(answer, sort, filter) {
  const wanted = filter.trim().toLowerCase();
  const rows = ranked(answer).filter((row) => row.text.toLowerCase().includes(wanted));
  if (sort === "order") return rows.sort((a, b) => a.index - b.index);
  const [column, direction] = sort.split("-");
  const sign = direction === "up" ? 1 : -1;
  return rows.sort((a, b) => sign * (valueOf(a, column) - valueOf(b, column)) || a.rank - b.rank);
}

/** All rows by the first column, each with its rank. */
export function ranked(answer) {
  const rows = [...answer.rows].sort((a, b) => valueOf(b, 0) - valueOf(a, 0) || a.index - b.index);
  return rows.map((row, position) => ({ ...row, rank: position + 1 }));
}

/** Rows without a score come last, and two of them are equal. */
const valueOf = (row, column) => row.values?.[column] ?? -Number.MAX_VALUE;

/** The lowest and the highest value that the first column may have, or has where any is possible. */
export function scoreRange(answer) {
  if (answer.isShare) return [0, 1];
  if (answer.range) return answer.range;
  let [low, high] = [Infinity, -Infinity];
  for (const { values } of answer.rows) {
    if (values) [low, high] = [Math.min(low, values[0]), Math.max(high, values[0])];
  }
  return low <= high ? [low, high] : [0, 1];
}

/** How far the bar of a value is filled. */
export function barScale(answer) {
  const [low, high] = scoreRange(answer);
  return (value) => (high > low ? (value - low) / (high - low) : 1);
}

/** As a spreadsheet reads it. A cell that would be taken for a formula is text. */
export function asCsv(answer, rows, expected) {
  const known = (cells) => (expected.length ? cells : []);
  const lines = [["rank", "index", "item", ...known(["expected"]), ...answer.columns]];
  for (const row of rows) {
    lines.push([row.rank, row.index, row.text, ...known([expected[row.index] ?? ""]),
      ...(row.values ?? answer.columns.map(() => ""))]);
  }
  return lines.map((line) => line.map(csvCell).join(",")).join("\r\n") + "\r\n";
}

function csvCell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** With the request that it answers, so that it can be repeated. */
export function asJsonFile(answer, rows, expected) {
  const shown = rows.map(({ rank, index, text, values, error }) => (
    { rank, index, item: text, ...(expected[index] ? { expected: expected[index] } : {}),
      scores: values && Object.fromEntries(answer.columns.map((name, i) => [name, values[i]])), ...(error ? { error } : {}) }
  ));
  return JSON.stringify({ request: answer.request, usage: answer.usage, results: shown }, null, 2);
}
