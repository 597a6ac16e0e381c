/**
 * The report viewer. The server makes a report with the code of `itemwise bench report`; it is shown in a frame in which
 * no script runs.
 */
import { ApiError, getJson, getText, postText, setKey } from "./api.js";
import { byId, element, takeDrops } from "./dom.js";
import { clearErrors, showError } from "./errors.js";

const frame = byId("report");

async function listArtifacts() {
  try {
    const { has_folder: hasFolder, artifacts } = await getJson("/reports/list");
    byId("status").textContent = hasFolder
      ? `${artifacts.length} artifacts in the folder of reports.`
      : "This server was started without --reports-dir; files can be dropped all the same.";
    byId("folders").replaceChildren(...folders(artifacts));
    showNamed();
  } catch (error) {
    report(error);
  }
}

function folders(artifacts) {
  const names = [...new Set(artifacts.map((each) => each.folder))];
  return names.flatMap((folder) => [
    element("h3", {}, folder === "." ? "In the folder itself" : folder),
    element("ul", {}, ...artifacts.filter((each) => each.folder === folder).map(entry)),
  ]);
}

function entry({ name, kind }) {
  const link = element("a", { href: `#name=${encodeURIComponent(name)}` }, name.split("/").pop());
  return element("li", {}, link, ` ${kind}`);
}

/** The artifact that the address names: a link to a report reproduces it. */
function showNamed() {
  const name = new URLSearchParams(location.hash.slice(1)).get("name");
  if (name) show(name, () => getText(`/reports/view?name=${encodeURIComponent(name)}`));
}

const showFile = ([file]) => show(file.name, async () => (
  postText(`/reports/view?name=${encodeURIComponent(file.name)}`, await file.text())
));

async function show(name, load) {
  clearErrors();
  byId("status").textContent = `Reading ${name}…`;
  try {
    frame.srcdoc = await load();
    frame.title = `Report of ${name}`;
    frame.hidden = false;
    byId("nothing").hidden = true;
    byId("report-heading").textContent = name;
    byId("status").textContent = `Showing ${name}.`;
  } catch (error) {
    report(error);
  }
}

function report(error) {
  byId("status").textContent = "";
  if (error instanceof ApiError && error.status === 401) byId("key-field").hidden = false;
  showError(error instanceof ApiError ? error : new ApiError(0, { message: `the server cannot be reached: ${error.message}` }));
}

/** As high as what it shows, so that there is one scroll bar and not two. */
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
byId("key").addEventListener("change", (event) => {
  setKey(event.target.value);
  clearErrors();
  listArtifacts();
});
listArtifacts();
