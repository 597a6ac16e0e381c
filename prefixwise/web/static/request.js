/** Builds the request from the state, and shows it as curl and Python code. */

const ITEM = "{item}"; // in a judge's message: where each item is put

/** `{path, body}` of the form's request. */
export function buildRequest(state, items) {
  if (state.task === "judge") return judgeRequest(state, items);
  return state.task === "rerank" ? rerankRequest(state, items) : scoreRequest(state, items);
}

function scoreRequest(state, items) {
  const body = {
    query: state.query,
    items,
    labels: labelsOf(state),
    score_mode: state.scoreMode,
    label_scoring: state.labelScoring,
  };
  if (state.itemFirst) body.item_first = true;
  if (state.suffix) body.suffix = state.suffix;
  if (state.algorithm !== "auto") body.algorithm = state.algorithm;
  return { path: "/v1/score", body };
}

function rerankRequest(state, items) {
  const body = { query: state.query, documents: items };
  if (state.profile) body.profile = state.profile;
  if (state.instruction) body.instruction = state.instruction;
  if (state.algorithm !== "auto") body.algorithm = state.algorithm;
  return { path: "/v1/rerank", body };
}

/** One message with the item behind the query, unless the query has a place for it. One label is a scale. */
function judgeRequest(state, items) {
  const content = state.query + (state.query.includes(ITEM) ? "" : ITEM) + state.suffix;
  const messages = [{ role: "user", content }];
  if (state.prefill) messages.push({ role: "assistant", content: state.prefill });
  const labels = labelsOf(state);
  const body = { messages, items, answers: labels.length === 1 ? labels[0] : labels };
  const values = state.values.split(/[\s,;]+/).filter(Boolean);
  if (values.length) body.values = values.map((each) => (Number.isNaN(Number(each)) ? each : Number(each)));
  if (state.algorithm !== "auto") body.algorithm = state.algorithm;
  return { path: "/v1/judge", body };
}

/** The labels, with the spaces before them. */
export function labelsOf(state) {
  return state.labels.split("\n").filter((line) => line.trim() !== "");
}

/** The same request with other items. */
export function withItems(request, items) {
  const name = itemsField(request);
  return { ...request, body: { ...request.body, [name]: items } };
}

/** The same request with more fields. */
export function withFields(request, fields) {
  return { ...request, body: { ...request.body, ...fields } };
}

export const itemsOf = (request) => request.body[itemsField(request)];

/** The name of an item in the API. */
export const itemName = (request, index) => `${itemsField(request)}[${index}]`;

const itemsField = (request) => ("documents" in request.body ? "documents" : "items");

/** The request as a shell command. */
export function asCurl(request, origin, needsKey) {
  const key = needsKey ? ' \\\n  -H "Authorization: Bearer $PREFIXWISE_API_KEY"' : "";
  const data = JSON.stringify(request.body, null, 1).replaceAll("'", "'\\''");
  return `curl -s ${origin}${request.path}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${data}'`;
}

/** The request as a Python program without dependencies. */
export function asPython(request, origin, needsKey) {
  const key = needsKey ? `\n    "Authorization": "Bearer " + os.environ["PREFIXWISE_API_KEY"],` : "";
  return `import json
${needsKey ? "import os\n" : ""}from urllib.request import Request, urlopen

body = ${pythonLiteral(request.body, 0)}
headers = {
    "Content-Type": "application/json",${key}
}
request = Request("${origin}${request.path}", json.dumps(body).encode(), headers)
with urlopen(request) as response:
    print(json.dumps(json.load(response), indent=2))
`;
}

/** The body alone. */
export const asJson = (request) => JSON.stringify(request.body, null, 2);

function pythonLiteral(value, depth) {
  const pad = "    ".repeat(depth + 1);
  const close = `\n${"    ".repeat(depth)}`;
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) {
    return `[${value.map((each) => `\n${pad}${pythonLiteral(each, depth + 1)},`).join("")}${value.length ? close : ""}]`;
  }
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([name, each]) => `\n${pad}"${name}": ${pythonLiteral(each, depth + 1)},`);
    return `{${entries.join("")}${close}}`;
  }
  return JSON.stringify(value);
}
