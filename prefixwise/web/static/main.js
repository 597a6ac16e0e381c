/** The playground: the form, one request at a time, and the panels about its answer. */
import { ApiError, getJson, send, setKey } from "./api.js";
import { arranged, asCsv, asJsonFile, readAnswer } from "./answer.js";
import { otherState, showComparison } from "./comparison.js";
import { copy, showCopies } from "./copies.js";
import { showDistribution } from "./distribution.js";
import { bringIntoView, byId, counted, debounced, download, element, shortNumber } from "./dom.js";
import { clearErrors, showError } from "./errors.js";
import { EXAMPLES, openingExample } from "./examples.js";
import { expectedOf } from "./expected.js";
import { showFirstSteps } from "./first_steps.js";
import { showIsolation } from "./isolation.js";
import { watchItemInput } from "./item_input.js";
import { itemsOfLines } from "./items.js";
import { startLiveMetrics } from "./live.js";
import { showHowItRan } from "./ran.js";
import { buildRequest, itemName, itemsOf, withFields } from "./request.js";
import { ResultList } from "./result_list.js";
import { showWhatWasSeen } from "./saw.js";
import { DEFAULTS, keepInAddress, OTHER_FIELDS, readForm, stateFromHash, withOther, writeForm } from "./state.js";
import { makeTabs } from "./tabs.js";
import { showThreshold } from "./threshold.js";

const TYPING_PAUSE_MS = 500;
const NOT_READY_MS = 1000; // before the next request to the server
const MOST_ITEMS_AS_YOU_GO = 200; // more are scored on demand
const VIEW_ONLY = ["sort", "filter", "asYouGo", "expected", ...Object.keys(OTHER_FIELDS)]; // the request stays the same
const MORE_OPTIONS = ["scoreMode", "labelScoring", "algorithm", "itemFirst"];
const SMALL_MODEL = 1e9; // parameters
const LABELS_HINT = "One per line; items are ranked by the first. A leading space matters.";
const JUDGE_HINT = "The answers to choose from: a scale like 1-5, A-E or yes/no, or one answer per line.";

// Descriptions of the panels, shown before there is a result.
const DESCRIPTIONS = {
  distribution: "The probability of each label or answer for the chosen item; of a judge also expected value and entropy.",
  threshold: "A histogram of the scores, how many items reach a threshold, and a confusion table for expected labels.",
  saw: "The tokens of an item as the model gets them, the position at which it is scored, and the most likely next tokens.",
  isolation: "The attention mask as a picture, and an experiment: change one item, and no other item's score changes.",
  ran: "The algorithm and why it was chosen, the batches, and the time of each stage.",
};

const form = byId("form");
let state = withOther(stateFromHash(location.hash) ?? DEFAULTS);
let opening = DEFAULTS; // the state of an address without a hash
let isUntouched = location.hash === ""; // nothing came by a link or from the user: the page opens with an example
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

const compareSoon = debounced(() => {
  if (state.asYouGo && items().length <= MOST_ITEMS_AS_YOU_GO) fillPanel();
}, TYPING_PAUSE_MS);

const items = () => itemsOfLines(state.items);
const expected = () => expectedOf(state.expected);
const request = () => buildRequest(state, items());
const isComplete = () => state.query !== "" && items().length > 0 && (state.task === "rerank" || state.labels.trim() !== "");
const keep = () => keepInAddress(state, opening);

// The request

/** @param isAsked true if the user has asked for this scoring, by a button or key */
async function score(isAsked = false) {
  scoreSoon.cancel(); // otherwise the same request is sent twice, and its second response discards changes made meanwhile
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
    if (isAsked) bringIntoView(byId("results-heading"));
  } catch (error) {
    if (own.signal.aborted) return;
    const place = report(error);
    if (isAsked) bringIntoView(place);
    setStatus(`Not scored: see the error in the form.${answer ? " The scores below are from the request before." : ""}`);
    byId("list").classList.add("stale");
  } finally {
    if (running === own) {
      running = null;
      byId("list").removeAttribute("aria-busy");
    }
  }
}

/** Run a panel's request and show an error in `place`; a newer request aborts the older one. */
async function ask(place, work) {
  asking?.abort();
  const own = (asking = new AbortController());
  try {
    await work(own.signal);
  } catch (error) {
    if (own.signal.aborted) return;
    report(error);
    place.removeAttribute("aria-busy");
    place.replaceChildren(element("p", { class: "error" }, error.message));
  }
}

function report(error) {
  if (!(error instanceof ApiError)) error = new ApiError(0, { message: `the server cannot be reached: ${error.message}` });
  if (error.param === "api_key") enableKey();
  return showError(error);
}

// The answer

function show(received, milliseconds) {
  answer = received;
  const { rows, usage, notes } = answer;
  const failed = rows.filter((row) => !row.values).length;
  setStatus([
    `${counted(rows.length, "item")} in ${Math.round(milliseconds).toLocaleString("en")} ms`,
    counted(usage.prompt_tokens, "token"),
    ...(failed ? [`${failed} without a score`] : []),
  ].join(" · "));
  byId("notes").textContent = notes.join(" ");
  for (const id of ["sort", "filter", "save-csv", "save-json"]) byId(id).disabled = false;
  byId("nothing").hidden = true;
  byId("list").classList.remove("stale");
  offerSorts();
  arrange();
}

/** Before the first answer, and for a form that is not complete. */
function showNothing() {
  running?.abort();
  answer = null;
  shownRows = [];
  setStatus("");
  byId("notes").textContent = "";
  for (const id of ["sort", "filter", "save-csv", "save-json"]) byId(id).disabled = true;
  for (const id of ["list", "no-match"]) byId(id).hidden = true;
  byId("nothing").hidden = false;
  showChosen();
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
  byId("list").hidden = shownRows.length === 0;
  byId("no-match").hidden = shownRows.length > 0;
  list.show(answer, shownRows, chosenRow()?.index ?? -1);
  showChosen();
  fillPanel();
}

/** The selected row: the chosen one, else the best. */
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
  const name = row && element("code", { class: "faint" }, itemName(answer.request, row.index));
  byId("chosen").replaceChildren(...(row ? [name, ` ${row.text || "(empty)"}\n`, values.join(", ")] : []));
}

function fillPanel() {
  if (state.tab === "compare") {
    fillComparison();
    return;
  }
  const panel = byId(`panel-${state.tab}`);
  if (state.tab === "copy") {
    showCopies(panel, request(), server?.api_key_set ?? false);
    return;
  }
  const row = chosenRow();
  if (!answer?.debug || !row?.values) {
    const hint = answer ? "Choose an item that has a score." : DESCRIPTIONS[state.tab];
    panel.replaceChildren(element("p", { class: "faint" }, hint));
  } else if (state.tab === "distribution") showDistribution(panel, answer, row);
  else if (state.tab === "threshold") showThreshold(panel, answer, expected(), state.threshold, keepThreshold);
  else if (state.tab === "saw") ask(panel, (signal) => showWhatWasSeen(panel, answer, row, signal));
  else if (state.tab === "isolation") showIsolation(panel, answer, row, ask);
  else showHowItRan(panel, answer, ask);
}

function keepThreshold(threshold) {
  state.threshold = threshold;
  keep();
}

function fillComparison() {
  compareSoon.cancel();
  const place = byId("comparison");
  if (answer && state.compares) {
    const other = buildRequest(otherState(state), itemsOf(answer.request));
    ask(place, (signal) => showComparison(place, answer, other, expected(), signal));
    return;
  }
  const hint = answer ? "Change the prompt or the labels of B: ranks and scores of both appear here." : "No results yet.";
  place.replaceChildren(element("p", { class: "faint" }, hint));
}

// The form

function onInput(event) {
  const name = event?.target?.name;
  isUntouched = false;
  state = readForm(form, state);
  if (name in OTHER_FIELDS) state.compares = true;
  state = withOther(state);
  writeForm(form, state);
  keep();
  showForm();
  if (name in OTHER_FIELDS) compareSoon();
  else if (VIEW_ONLY.includes(name)) {
    if (name !== "asYouGo") arrange();
  } else onRequestChange();
}

function onRequestChange() {
  state.chosen = "";
  if (state.tab === "copy") fillPanel();
  scoreSoon();
}

function showForm() {
  const { task } = state;
  const shown = { labels: task !== "rerank", scores: task === "labels", rerank: task === "rerank", judge: task === "judge" };
  for (const [name, isShown] of Object.entries(shown)) {
    for (const part of document.querySelectorAll(`.of-${name}`)) part.hidden = !isShown;
  }
  byId("labels-hint").textContent = task === "judge" ? JUDGE_HINT : LABELS_HINT;
  const count = items().length;
  const onDemand = state.asYouGo && count > MOST_ITEMS_AS_YOU_GO ? ", scored on demand" : "";
  const tooLong = keep() ? "" : ", too long for a link";
  byId("item-count").textContent = counted(count, "item") + onDemand + tooLong;
  const numExpected = expected().length;
  byId("expected-count").textContent = numExpected > count ? `(${numExpected}, more than items)` : `(${numExpected || "none"})`;
}

function setStatus(text) {
  byId("status").textContent = text;
}

function take(newState, isAsked = false) {
  isUntouched &&= !isAsked;
  state = withOther(newState);
  writeForm(form, state);
  if (MORE_OPTIONS.some((name) => state[name] !== DEFAULTS[name])) byId("more").open = true;
  showForm();
  if (!isComplete()) showNothing();
  showTab(state.tab);
  if (isComplete() && (isAsked || server?.model)) score(isAsked);
}

function offerExamples() {
  const button = (name, own) => element("button", {
    type: "button",
    onclick: () => take({ ...DEFAULTS, asYouGo: state.asYouGo, tab: state.tab, ...own }, true),
  }, name);
  byId("examples").replaceChildren("Try: ", ...EXAMPLES.map(({ name, state: own }) => button(name, own)),
    button("Empty form", {}));
}

/** The address has the state: it reproduces what is on the screen, on this server or another. */
async function share() {
  if (!keep()) setStatus("The items are too long for a link; download the results instead.");
  else setStatus((await copy(location.href)) ? "The link is copied." : "Copy the link from the address bar.");
}

// The server

async function askServer() {
  try {
    server = await getJson("/server_info");
  } catch (error) {
    const needsKey = error instanceof ApiError && error.status === 401;
    byId("served").textContent = needsKey ? "This server requires an API key." : "The server does not answer.";
    if (needsKey) {
      server = { api_key_set: true };
      enableKey();
    }
    return;
  }
  if (server.api_key_set) enableKey();
  if (server.model) onModel();
  else {
    byId("served").textContent = `The server is ${server.status}.`;
    setTimeout(askServer, NOT_READY_MS);
  }
}

/** The model is there: say which, and score what the link has, or an example. */
function onModel() {
  const { model, devices, profiles } = server;
  byId("served").textContent = `${model.name} · ${devices.backend} on ${devices.device}, ${devices.dtype}`;
  byId("model-note").textContent = model.num_parameters < SMALL_MODEL
    ? `This server's model is small, with ${Math.ceil(model.num_parameters / 1e6)} million parameters: quick on any CPU, and `
      + "often wrong." : "";
  offerProfiles(profiles);
  opening = { ...DEFAULTS, ...openingExample(server) };
  if (isUntouched) take(opening);
  else {
    keep();
    if (isComplete() && !answer && !running) score();
  }
}

function enableKey() {
  byId("key-field").hidden = false;
}

function offerProfiles(profiles) {
  const own = element("option", { value: "" }, `the model's default (${profiles.default ?? "none"})`);
  byId("profile").replaceChildren(own, ...profiles.names.map((name) => element("option", {}, name)));
  byId("profile").value = state.profile;
}

// The beginning

const isCtrlEnter = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey);

form.addEventListener("input", onInput);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  score(true);
});
// These controls of the form stand elsewhere, so that their events do not pass it.
for (const control of document.querySelectorAll("[form=form]")) control.addEventListener("input", onInput);
form.addEventListener("keydown", (event) => isCtrlEnter(event) && score(true));
byId("panel-compare").addEventListener("keydown", (event) => isCtrlEnter(event) && fillPanel());
byId("compare-both").addEventListener("click", () => {
  state.compares = true;
  keep();
  fillPanel();
});
byId("compare-reset").addEventListener("click", () => {
  state = withOther({ ...state, compares: false });
  writeForm(form, state);
  keep();
  fillPanel();
});
byId("share").addEventListener("click", share);
for (const link of document.querySelectorAll(".skip, .to-results")) {
  link.addEventListener("click", (event) => {
    event.preventDefault(); // the part after the # is the state
    byId("results-heading").focus();
  });
}
byId("key").addEventListener("change", async (event) => {
  setKey(event.target.value);
  clearErrors();
  await askServer();
  if (isComplete() && !running) score();
});
byId("save-csv").addEventListener("click", () => {
  if (answer) download("scores.csv", "text/csv", asCsv(answer, shownRows, expected()));
});
byId("save-json").addEventListener("click", () => {
  if (answer) download("scores.json", "application/json", asJsonFile(answer, shownRows, expected()));
});
window.addEventListener("hashchange", () => take(stateFromHash(location.hash) ?? opening));
watchItemInput(() => onInput(), (message) => showError(new ApiError(0, { message, param: "items" })));
offerExamples();
showFirstSteps();
startLiveMetrics();
take(state);
await askServer();
