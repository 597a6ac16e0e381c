/** The state that a link reproduces: the form and the view. It is stored after the # of the address, which is never sent. */

export const DEFAULTS = Object.freeze({
  query: "",
  items: "",
  task: "labels",
  labels: "",
  suffix: "",
  scoreMode: "softmax",
  labelScoring: "sequence",
  itemFirst: false,
  profile: "",
  instruction: "",
  algorithm: "auto",
  asYouGo: true,
  sort: "0-down",
  filter: "",
  tab: "saw",
  chosen: "",
});

/** Longer states are not put into the address. */
export const MAX_ADDRESS_LENGTH = 64_000;

/** The complete state from an address's hash. */
export function stateFromHash(hash) {
  const state = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (name in DEFAULTS) state[name] = typeof DEFAULTS[name] === "boolean" ? value === "1" : value;
  }
  return state;
}

/** The hash of a state: only what differs from the defaults. Null where it would be too long. */
export function hashOfState(state) {
  const said = new URLSearchParams();
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (state[name] !== value) said.set(name, typeof value === "boolean" ? (state[name] ? "1" : "0") : state[name]);
  }
  const text = said.toString();
  return text.length > MAX_ADDRESS_LENGTH ? null : text;
}

/** Put the state into the address bar; false where it is too long for that. */
export function keepInAddress(state) {
  const hash = hashOfState(state);
  const address = location.pathname + location.search + (hash ? `#${hash}` : "");
  if (address !== location.pathname + location.search + location.hash) history.replaceState(null, "", address);
  return hash !== null;
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
