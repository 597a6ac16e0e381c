/** The items field: pasted, dropped or opened content becomes lines. */
import { byId, element, takeDrops } from "./dom.js";
import { columnItems, labelColumn, likelyColumn, linesOfItems, looksSeparated, tableOf } from "./items.js";

const NO_COLUMN = "";

/** @param onChange called when the items have changed. @param onFault called with the error if content cannot be read. */
export function watchItemInput(onChange, onFault) {
  const field = byId("items");
  const choice = byId("column");
  const labelChoice = byId("label-column");
  let table = null;

  function put() {
    const labels = labelChoice.value === NO_COLUMN ? null : Number(labelChoice.value);
    const found = columnItems(table, Number(choice.value), labels);
    field.value = linesOfItems(found.items);
    byId("expected").value = found.labels.join("\n");
    onChange();
  }

  function take(text, name) {
    try {
      table = tableOf(text, name);
    } catch (fault) {
      onFault(`${name || "what was pasted"} cannot be read: ${fault.message}`);
      return;
    }
    const options = () => table.columns.map((title, index) => element("option", { value: index }, title));
    choice.replaceChildren(...options());
    choice.value = String(likelyColumn(table));
    labelChoice.replaceChildren(element("option", { value: NO_COLUMN }, "none"), ...options());
    labelChoice.value = String(labelColumn(table) ?? NO_COLUMN);
    byId("column-choice").hidden = table.columns.length < 2;
    put();
  }

  const takeFiles = async ([file]) => take(await file.text(), file.name);
  for (const each of [choice, labelChoice]) each.addEventListener("change", put);
  takeDrops(field, takeFiles);
  byId("file").addEventListener("change", async (event) => {
    if (event.target.files.length) await takeFiles([...event.target.files]);
    event.target.value = "";
  });
  field.addEventListener("paste", (event) => {
    const text = event.clipboardData.getData("text/plain");
    if (!looksSeparated(text)) return;
    event.preventDefault();
    take(text, "");
  });
}
