/** Items from text, from cells of a spreadsheet and from files. */

/** The sign for a line break inside an item: in the field, each line is an item. */
export const LINE_BREAK = "⏎";

const TEXT_COLUMNS = ["text", "item", "document", "content", "passage", "title", "name"];
const LABEL_COLUMNS = ["label", "expected", "expected label", "class", "category", "target"];

/** The items of the text field: its lines that are not empty. */
export function itemsOfLines(text) {
  return text.split("\n").filter((line) => line.trim() !== "").map((line) => line.replaceAll(LINE_BREAK, "\n"));
}

/** The text of the field for these items. */
export function linesOfItems(items) {
  return items.map((item) => item.replace(/\r\n?|\n/g, LINE_BREAK)).join("\n");
}

/**
 * A file's or a clipboard's text as a table: `{columns, rows}`, rows of as many strings as there are columns.
 * @param name of the file, which says what it is; a clipboard has none.
 */
export function tableOf(text, name = "") {
  const ending = name.toLowerCase().split(".").pop();
  const clean = text.replace(/^\uFEFF/, "");
  if (["jsonl", "ndjson", "json"].includes(ending)) return tableOfRecords(readRecords(clean, ending === "json"));
  if (ending === "csv") return withHeader(separatedRows(clean, ","));
  if (ending === "tsv") return withHeader(separatedRows(clean, "\t"));
  if (name === "" && looksSeparated(clean)) return withHeader(separatedRows(clean, "\t"));
  return { columns: ["text"], rows: clean.split(/\r\n?|\n/).filter((line) => line.trim()).map((line) => [line]) };
}

/** True for several columns, or a cell with a line break, as spreadsheets copy them to the clipboard. */
export function looksSeparated(text) {
  return /\t/.test(text) || /(^|\n)"[^"]*\n[^"]*"(\n|$)/.test(text.replace(/\r\n?/g, "\n"));
}

/** The column that most likely contains the text: by its name, else the one with the longest cells. */
export function likelyColumn(table) {
  const found = namedColumn(table, TEXT_COLUMNS);
  if (found !== undefined) return found;
  const sizes = table.columns.map((_, index) => table.rows.slice(0, 50).reduce((sum, row) => sum + row[index].length, 0));
  return sizes.indexOf(Math.max(...sizes));
}

/** The column with expected labels, by its name. */
export const labelColumn = (table) => namedColumn(table, LABEL_COLUMNS);

function namedColumn({ columns }, names) {
  const titles = columns.map((column) => column.trim().toLowerCase());
  return names.map((name) => titles.indexOf(name)).find((index) => index >= 0);
}

/** `{items, labels}`: the cells of one column that are not empty, and those of the other beside them, if there is one. */
export function columnItems({ rows }, column, labelsColumn = null) {
  const used = rows.filter((row) => row[column].trim() !== "");
  return {
    items: used.map((row) => row[column]),
    labels: labelsColumn === null ? [] : used.map((row) => row[labelsColumn].trim().replace(/\s+/g, " ")),
  };
}

function readRecords(text, isOneDocument) {
  if (isOneDocument) {
    const whole = JSON.parse(text);
    if (Array.isArray(whole)) return whole;
    const list = ["items", "documents", "texts", "data"].map((name) => whole?.[name]).find(Array.isArray);
    return list ?? [whole];
  }
  return text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
}

function tableOfRecords(records) {
  const columns = new Set();
  for (const record of records) for (const name of isObject(record) ? Object.keys(record) : ["text"]) columns.add(name);
  const names = [...columns];
  const cell = (record, name) => asText(isObject(record) ? record[name] : name === "text" ? record : "");
  return { columns: names, rows: records.map((record) => names.map((name) => cell(record, name))) };
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const asText = (value) => (value == null ? "" : typeof value === "string" ? value : JSON.stringify(value));

/** Rows of cells, where quotes may hold separators, line breaks and (doubled) quotes. */
function separatedRows(text, separator) {
  const rows = [];
  let row = [];
  let at = 0;
  while (at < text.length) {
    const [cell, next] = readCell(text, at, separator);
    row.push(cell);
    at = next + 1;
    if (text[next] !== separator) {
      if (text[next] === "\r" && text[next + 1] === "\n") at += 1;
      rows.push(row);
      row = [];
    } else if (at === text.length) row.push("");
  }
  if (row.length) rows.push(row);
  return rows.filter((each) => each.some((cell) => cell.trim() !== ""));
}

/** One cell, and where it ends. */
function readCell(text, start, separator) {
  if (text[start] !== '"') {
    let end = start;
    while (end < text.length && text[end] !== separator && text[end] !== "\n" && text[end] !== "\r") end += 1;
    return [text.slice(start, end), end];
  }
  let cell = "";
  let at = start + 1;
  for (;;) {
    const quote = text.indexOf('"', at);
    if (quote < 0) return [cell + text.slice(at), text.length];
    cell += text.slice(at, quote);
    if (text[quote + 1] !== '"') return [cell, quote + 1];
    cell += '"';
    at = quote + 2;
  }
}

/** True if the first row looks like column names: none empty, all different, none long. */
function withHeader(rows) {
  const width = Math.max(1, ...rows.map((row) => row.length));
  const even = rows.map((row) => [...row, ...Array(width - row.length).fill("")]);
  const [first = []] = even;
  const isHeader = even.length > 1 && new Set(first).size === width
    && first.every((cell) => /^[A-Za-z_][\w .-]{0,29}$/.test(cell.trim()))
    && (width > 1 || TEXT_COLUMNS.includes(first[0].trim().toLowerCase()));
  if (isHeader) return { columns: first, rows: even.slice(1) };
  return { columns: Array.from({ length: width }, (_, index) => `column ${index + 1}`), rows: even };
}
