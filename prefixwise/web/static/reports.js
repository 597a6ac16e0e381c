/**
 * The report viewer. The server makes a report with the code of `prefixwise bench report`; it is shown in a frame in which
 * no script runs.
 */
import { ApiError, getJson, getText, postText, setKey } from "./api.js";
import { bringIntoView, byId, counted, element, takeDrops } from "./dom.js";
import { clearErrors, showError } from "./errors.js";

const frame = byId("report");

async function listArtifacts() {
  try {
    const { has_folder: hasFolder, artifacts } = await getJson("/reports/list");
    byId("folder-note").textContent = hasFolder
      ? `${counted(artifacts.filter((each) => !each.note).length, "report")} in the folder of this server.`
      : "This server was started without --reports-dir: this is a sample. Your own files can be dropped here.";
    byId("folders").replaceChildren(...folders(artifacts, hasFolder));
    if (location.hash || hasFolder) showNamed();
    else showListed(artifacts[0].name, false);
  } catch (error) {
    report(error);
  }
}

function folders(artifacts, hasFolder) {
  const names = [...new Set(artifacts.map((each) => each.folder))];
  return names.flatMap((folder) => [
    element("h3", {}, folder !== "." ? folder : hasFolder ? "In the folder itself" : "Sample"),
    element("ul", { class: "artifacts" }, ...artifacts.filter((each) => each.folder === folder).map(entry)),
  ]);
}

function entry({ name, kind, note }) {
  const parts = [element("span", {}, name.split("/").pop()), " ", element("span", { class: "badge" }, kind)];
  if (note) return element("li", { class: "part" }, ...parts, element("p", { class: "hint" }, note));
  return element("li", {}, element("a", { href: `#name=${encodeURIComponent(name)}`, "data-name": name }, ...parts));
}

/** Mark the entry of the open report; a dropped file has none. */
function markOpen(name) {
  for (const link of byId("folders").querySelectorAll("a")) {
    if (link.dataset.name === name) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

/** The artifact that the address names: a link to a report reproduces it. */
function showNamed() {
  const name = new URLSearchParams(location.hash.slice(1)).get("name");
  if (name) showListed(name);
}

const showListed = (name, isAsked = true) => (
  show(name, () => getText(`/reports/view?name=${encodeURIComponent(name)}`), name, isAsked));

const showFile = ([file]) => show(file.name, async () => (
  postText(`/reports/view?name=${encodeURIComponent(file.name)}`, await file.text())
));

async function show(name, load, listed = null, isAsked = true) {
  clearErrors();
  byId("status").textContent = `Reading ${name}…`;
  try {
    frame.srcdoc = await load();
    frame.title = `Report of ${name}`;
    frame.hidden = false;
    byId("nothing").hidden = true;
    byId("report-heading").textContent = name;
    byId("status").textContent = `Showing ${name}.`;
    markOpen(listed);
    if (isAsked) bringIntoView(byId("report-heading"));
  } catch (error) {
    report(error);
  }
}

function report(error) {
  byId("status").textContent = "";
  if (error instanceof ApiError && error.status === 401) byId("key-field").hidden = false;
  showError(error instanceof ApiError ? error : new ApiError(0, { message: `the server cannot be reached: ${error.message}` }));
}

/** As high as its content, so that there is only one scroll bar. */
function fitFrame() {
  const inside = frame.contentDocument?.documentElement;
  if (inside) frame.style.height = `${inside.scrollHeight + 2}px`;
}

frame.addEventListener("load", fitFrame);
window.addEventListener("resize", fitFrame);
window.addEventListener("hashchange", showNamed);
takeDrops(byId("drop"), showFile);
byId("file").addEventListener("change", async (event) => {
  if (event.target.files.length) await showFile([...event.target.files]);
  event.target.value = "";
});
byId("key-field").addEventListener("submit", (event) => event.preventDefault());
byId("key").addEventListener("change", (event) => {
  setKey(event.target.value);
  clearErrors();
  listArtifacts();
});
listArtifacts();
