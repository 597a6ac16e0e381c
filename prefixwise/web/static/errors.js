/** Errors of the API, next to the field that they name. */
import { byId } from "./dom.js";

/** Remove all errors. */
export function clearErrors() {
  for (const place of document.querySelectorAll("p.error")) place.textContent = "";
  for (const control of document.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
}

/** Show an error at the field that it names, or below all fields. Returns the element. */
export function showError(error) {
  clearErrors();
  const field = error.param && document.querySelector(`[data-param~="${CSS.escape(error.param)}"]`);
  const place = field ? field.querySelector(".error") : byId("other-error");
  field?.closest("details")?.setAttribute("open", "");
  const named = error.param && !field ? `${error.param}: ` : "";
  place.textContent = named + error.message;
  const control = field?.querySelector("textarea, input, select");
  control?.setAttribute("aria-invalid", "true");
  return field ?? place;
}
