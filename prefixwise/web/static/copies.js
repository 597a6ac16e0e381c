/** "Copy": the request as curl, as Python and as JSON. */
import { element } from "./dom.js";
import { asCurl, asJson, asPython } from "./request.js";

const MAX_SHOWN = 4000; // characters; all of it is copied

/** Fill the panel with the current request. */
export function showCopies(panel, request, needsKey) {
  const status = element("p", { role: "status", class: "faint" });
  const forms = {
    curl: asCurl(request, location.origin, needsKey),
    Python: asPython(request, location.origin, needsKey),
    JSON: asJson(request),
  };
  const preview = element("pre", { tabindex: "0", "aria-label": "The request" });
  const buttons = Object.entries(forms).map(([name, text]) => element("button", {
    type: "button",
    id: `copy-${name.toLowerCase()}`,
    onclick: async () => {
      preview.textContent = shortened(text);
      status.textContent = (await copy(text)) ? `Copied as ${name}.` : "Select the text below to copy it.";
    },
  }, `Copy as ${name}`));
  preview.textContent = shortened(forms.curl);
  panel.replaceChildren(element("p", { class: "tools" }, ...buttons), status, preview);
}

const shortened = (text) => (text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}\n…` : text);

/** True if the text was copied. Pages without TLS, except on localhost, need the old API. */
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { /* not allowed: the old way may be */ }
  }
  const carrier = element("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  carrier.value = text;
  document.body.append(carrier);
  carrier.select();
  const isDone = document.execCommand("copy");
  carrier.remove();
  return isDone;
}
