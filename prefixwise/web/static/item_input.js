/** The items field: pasted, dropped or opened content becomes lines. */
import { byId, element, takeDrops } from "./dom.js";
import { columnItems, likelyColumn, linesOfItems, looksSeparated, tableOf } from "./items.js";

/** @param onChange called when the items have changed. @param onFault called with the error if content cannot be read. */
export function watchItemInput(onChange, onFault) {
  const field = byId("items");
  const choice = byId("column");
  let table = null;

  function put(column) {
    field.value = linesOfItems(columnItems(table, column));
    onChange();
  }

  function take(text, name) {
    try {
      table = tableOf(text, name);
    } catch (fault) {
      onFault(`${name || "what was pasted"} cannot be read: ${fault.message}`);
      return;
    }
    const column = likelyColumn(table);
    choice.replaceChildren(...table.columns.map((title, index) => element("option", { value: index }, title)));
    choice.value = String(column);
    byId("column-choice").hidden = table.columns.length < 2;
    put(column);
  }

  const takeFiles = async ([file]) => take(await file.text(), file.name);
  choice.addEventListener("change", () => put(Number(choice.value)));
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
