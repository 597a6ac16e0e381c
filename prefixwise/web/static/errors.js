/** Errors of the API, next to the field that they speak of. */
import { byId } from "./dom.js";

/** Take all errors away. */
export function clearErrors() {
  for (const place of document.querySelectorAll("p.error")) place.textContent = "";
  for (const control of document.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
}

/** Show one, by the field that it names; one that names none of ours stands below them. Returns where it stands. */
export function showError(error) {
  clearErrors();
  const field = error.param && document.querySelector(`[data-param~="${CSS.escape(error.param)}"]`);
  const place = field ? field.querySelector(".error") : byId("other-error");
  const named = error.param && !field ? `${error.param}: ` : "";
  place.textContent = named + error.message;
  const control = field?.querySelector("textarea, input, select");
  control?.setAttribute("aria-invalid", "true");
  return field ?? place;
}
