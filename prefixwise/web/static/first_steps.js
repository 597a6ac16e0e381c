/** A hint for the first visit, which stays away once it was read. */
import { byId } from "./dom.js";

const SEEN = "prefixwise-first-steps"; // in the browser's storage

/** Show it, unless this browser has closed it before. */
export function showFirstSteps() {
  const box = byId("first-steps");
  box.hidden = stored() !== null;
  byId("first-steps-seen").addEventListener("click", () => {
    box.hidden = true;
    byId("query").focus({ preventScroll: true });
    store();
  });
}

/** A browser may refuse its storage: then the hint is there each time. */
function stored() {
  try {
    return localStorage.getItem(SEEN);
  } catch {
    return null;
  }
}

function store() {
  try {
    localStorage.setItem(SEEN, "1");
  } catch { /* as above */ }
}
