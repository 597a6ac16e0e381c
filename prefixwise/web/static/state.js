/** The state that a link reproduces: the form and the view. It is stored after the # of the address, which is never sent. */

export const DEFAULTS = Object.freeze({
  query: "",
  items: "",
  expected: "",
  task: "labels",
  labels: "",
  suffix: "",
  scoreMode: "softmax",
  labelScoring: "sequence",
  itemFirst: false,
  profile: "",
  instruction: "",
  prefill: "",
  values: "",
  algorithm: "auto",
  asYouGo: true,
  sort: "0-down",
  filter: "",
  tab: "saw",
  chosen: "",
  threshold: "",
  compares: false,
  otherQuery: "",
  otherSuffix: "",
  otherLabels: "",
  otherInstruction: "",
});

/** The fields of the second prompt of a comparison, and those of the request that they stand for. */
export const OTHER_FIELDS = Object.freeze({
  otherQuery: "query", otherSuffix: "suffix", otherLabels: "labels", otherInstruction: "instruction",
});

/** Longer states are not put into the address. */
export const MAX_ADDRESS_LENGTH = 64_000;

/** The complete state from an address's hash; null where the address has none. */
export function stateFromHash(hash) {
  const text = hash.replace(/^#/, "");
  if (!text) return null;
  const state = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(text)) {
    if (name in DEFAULTS) state[name] = typeof DEFAULTS[name] === "boolean" ? value === "1" : value;
  }
  return state;
}

/** The hash of a state: only what differs from the defaults. An empty form has a hash too: none means `opening`. */
export function hashOfState(state, opening) {
  const text = differences(state);
  return text === differences(opening) ? "" : text || "query=";
}

function differences(state) {
  const said = new URLSearchParams();
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (state[name] === value || (name in OTHER_FIELDS && !state.compares)) continue;
    said.set(name, typeof value === "boolean" ? (state[name] ? "1" : "0") : state[name]);
  }
  return said.toString();
}

/** Put the state into the address bar; false where it is too long for that. */
export function keepInAddress(state, opening) {
  const text = hashOfState(state, opening);
  const isShort = text.length <= MAX_ADDRESS_LENGTH;
  const address = location.pathname + location.search + (isShort && text ? `#${text}` : "");
  if (address !== location.pathname + location.search + location.hash) history.replaceState(null, "", address);
  return isShort;
}

/** Until something is compared, the second prompt is the request's. */
export function withOther(state) {
  if (state.compares) return state;
  return { ...state, ...Object.fromEntries(Object.entries(OTHER_FIELDS).map(([name, own]) => [name, state[own]])) };
}

/** The state with the values of the form. */
export function readForm(form, state) {
  const read = { ...state };
  for (const control of form.elements) {
    if (!(control.name in DEFAULTS) || control.disabled) continue;
    if (control.type === "checkbox") read[control.name] = control.checked;
    else if (control.type !== "radio" || control.checked) read[control.name] = control.value;
  }
  return read;
}

/** Show a state in the form. */
export function writeForm(form, state) {
  for (const control of form.elements) {
    if (!(control.name in DEFAULTS)) continue;
    if (control.type === "checkbox") control.checked = state[control.name];
    else if (control.type === "radio") control.checked = control.value === state[control.name];
    else if (control.value !== state[control.name]) control.value = state[control.name];
  }
}
