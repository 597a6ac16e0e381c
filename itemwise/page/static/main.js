/** The playground: the form, one request at a time, and the panels about its answer. */
import { ApiError, getJson, send, setKey } from "./api.js";
import { arranged, asCsv, asJsonFile, readAnswer } from "./answer.js";
import { showCopies } from "./copies.js";
import { byId, debounced, download, element, shortNumber } from "./dom.js";
import { clearErrors, showError } from "./errors.js";
import { EXAMPLES } from "./examples.js";
import { showIsolation } from "./isolation.js";
import { watchItemInput } from "./item_input.js";
import { itemsOfLines } from "./items.js";
import { keepLive } from "./live.js";
import { showHowItRan } from "./ran.js";
import { buildRequest, withFields } from "./request.js";
import { ResultList } from "./result_list.js";
import { showWhatWasSeen } from "./saw.js";
import { DEFAULTS, keepInAddress, readForm, stateFromHash, writeForm } from "./state.js";
import { makeTabs } from "./tabs.js";

const TYPING_PAUSE_MS = 500;
const MOST_ITEMS_AS_YOU_GO = 200; // more are scored on demand
const VIEW_ONLY = ["sort", "filter", "asYouGo"]; // controls that do not change the request

const form = byId("form");
let state = stateFromHash(location.hash);
let server = null; // what /server_info says
let answer = null;
let shownRows = [];
let running = null; // the AbortController of the request on its way
let asking = null; // and of a panel's

const list = new ResultList(byId("list"), (row) => choose(row));
const showTab = makeTabs(byId("tabs"), (name) => {
  state.tab = name;
  keep();
  fillPanel();
});
const scoreSoon = debounced(() => {
  if (state.asYouGo && isComplete() && items().length <= MOST_ITEMS_AS_YOU_GO) score();
}, TYPING_PAUSE_MS);

const items = () => itemsOfLines(state.items);
const request = () => buildRequest(state, items());
const isComplete = () => state.query !== "" && items().length > 0 && (state.task === "rerank" || state.labels.trim() !== "");
const keep = () => keepInAddress(state);

// The request

async function score() {
  running?.abort();
  const own = (running = new AbortController());
  const asked = request();
  clearErrors();
  setStatus("Scoring…");
  byId("list").setAttribute("aria-busy", "true");
  const begin = performance.now();
  try {
    const received = await send(withFields(asked, { return_debug: true }), own.signal);
    show(readAnswer(asked, received), performance.now() - begin);
  } catch (error) {
    if (own.signal.aborted) return;
    report(error);
    setStatus("Nothing came back.");
  } finally {
    if (running === own) {
      running = null;
      byId("list").removeAttribute("aria-busy");
    }
  }
}

/** Run what a panel asks for; a newer question ends the older one. */
async function ask(work) {
  asking?.abort();
  const own = (asking = new AbortController());
  try {
    await work(own.signal);
  } catch (error) {
    if (!own.signal.aborted) report(error);
  }
}

function report(error) {
  if (!(error instanceof ApiError)) error = new ApiError(0, { message: `the server cannot be reached: ${error.message}` });
  showError(error);
}

// The answer

function show(received, milliseconds) {
  answer = received;
  const { rows, usage, notes } = answer;
  const failed = rows.filter((row) => !row.values).length;
  setStatus([
    `${rows.length.toLocaleString("en")} items in ${Math.round(milliseconds).toLocaleString("en")} ms`,
    `${usage.prompt_tokens.toLocaleString("en")} tokens`,
    ...(failed ? [`${failed} without a score`] : []),
    ...notes,
  ].join(" · "));
  offerSorts();
  arrange();
}

function offerSorts() {
  const sorts = answer.columns.flatMap((name, column) => [
    [`${column}-down`, `${name.trim()}, highest first`], [`${column}-up`, `${name.trim()}, lowest first`],
  ]);
  const options = [...sorts, ["order", "as given"]].map(([value, title]) => element("option", { value }, title));
  byId("sort").replaceChildren(...options);
  if (!options.some((option) => option.value === state.sort)) state.sort = DEFAULTS.sort;
  byId("sort").value = state.sort;
}

function arrange() {
  if (!answer) return;
  shownRows = arranged(answer, state.sort, state.filter);
  list.show(answer, shownRows, chosenRow()?.index ?? -1);
  showChosen();
  fillPanel();
}

/** The row that is looked at: the chosen one, else the best. */
function chosenRow() {
  const index = state.chosen === "" ? -1 : Number(state.chosen);
  return answer?.rows[index] ?? shownRows[0] ?? null;
}

function choose(row) {
  state.chosen = String(row.index);
  keep();
  showChosen();
  fillPanel();
}

function showChosen() {
  const row = chosenRow();
  const values = row?.values?.map((value, column) => `${answer.columns[column].trim()} ${shortNumber(value)}`) ?? [];
  byId("chosen").replaceChildren(...(row ? [element("strong", {}, `Item ${row.index}: `), row.text || "(empty)",
    element("br"), values.join(", ")] : []));
}

function fillPanel() {
  const panel = byId(`panel-${state.tab}`);
  if (state.tab === "copy") {
    showCopies(panel, request(), server?.api_key_set ?? false);
    return;
  }
  const row = chosenRow();
  if (!answer?.debug || !row?.values) {
    panel.replaceChildren(element("p", { class: "faint" }, "Score something first."));
  } else if (state.tab === "saw") ask((signal) => showWhatWasSeen(panel, answer, row, signal));
  else if (state.tab === "isolation") showIsolation(panel, answer, row, ask);
  else showHowItRan(panel, answer, ask);
}

// The form

function onInput(event) {
  state = readForm(form, state);
  keep();
  showForm();
  if (VIEW_ONLY.includes(event?.target?.name)) {
    if (event.target.name !== "asYouGo") arrange();
    return;
  }
  state.chosen = "";
  if (state.tab === "copy") fillPanel();
  scoreSoon();
}

function showForm() {
  const isRerank = state.task === "rerank";
  byId("labels-task").hidden = isRerank;
  byId("rerank-task").hidden = !isRerank;
  const count = items().length;
  const onDemand = state.asYouGo && count > MOST_ITEMS_AS_YOU_GO ? ", scored on demand" : "";
  const tooLong = keep() ? "" : ", too long for a link";
  byId("item-count").textContent = `${count.toLocaleString("en")} items${onDemand}${tooLong}`;
}

function setStatus(text) {
  byId("status").textContent = text;
}

function take(newState) {
  state = newState;
  writeForm(form, state);
  showForm();
  showTab(state.tab);
  if (isComplete()) score();
}

function offerExamples() {
  const buttons = EXAMPLES.map(({ name, state: own }) => element("button", {
    type: "button",
    onclick: () => take({ ...DEFAULTS, asYouGo: state.asYouGo, tab: state.tab, ...own }),
  }, name));
  byId("examples").replaceChildren("Try: ", ...buttons);
}

// The server

async function askServer() {
  try {
    server = await getJson("/server_info");
  } catch (error) {
    const needsKey = error instanceof ApiError && error.status === 401;
    byId("served").textContent = needsKey ? "This server asks for an API key." : "The server does not answer.";
    if (needsKey) {
      server = { api_key_set: true };
      enableKey();
    }
    return;
  }
  const { model, devices, status, profiles } = server;
  byId("served").textContent = model
    ? `${model.name} · ${devices.backend} on ${devices.device}, ${devices.dtype}` : `The server is ${status}.`;
  if (server.api_key_set) enableKey();
  if (profiles) offerProfiles(profiles);
}

function enableKey() {
  byId("key").disabled = false;
  byId("key").placeholder = "this server asks for one";
}

function offerProfiles(profiles) {
  const own = element("option", { value: "" }, `the model's own (${profiles.default ?? "none"})`);
  byId("profile").replaceChildren(own, ...profiles.names.map((name) => element("option", {}, name)));
  byId("profile").value = state.profile;
}

// The beginning

form.addEventListener("input", onInput);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  score();
});
for (const name of ["sort", "filter"]) byId(name).addEventListener("input", onInput);
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) score();
});
byId("key").addEventListener("change", async (event) => {
  setKey(event.target.value);
  clearErrors();
  await askServer();
  if (isComplete()) score();
});
byId("save-csv").addEventListener("click", () => answer && download("scores.csv", "text/csv", asCsv(answer, shownRows)));
byId("save-json").addEventListener("click", () => {
  if (answer) download("scores.json", "application/json", asJsonFile(answer, shownRows));
});
window.addEventListener("hashchange", () => take(stateFromHash(location.hash)));
watchItemInput(() => onInput(), (message) => showError(new ApiError(0, { message, param: "items" })));
offerExamples();
keepLive();
await askServer();
take(state);
