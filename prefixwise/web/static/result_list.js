/** The ranked list. Only the visible rows are in the document. */
import { barScale } from "./answer.js";
import { bar, element, shortNumber } from "./dom.js";

const TEXT_HEIGHT = 36; // pixels of a row without its values
const LINE_HEIGHT = 20; // of one line of values
const VALUE_WIDTH = 120; // at least, as page.css has it, and the gap between two
const VALUE_GAP = 12;
const NARROW = 560; // a list that is narrower has its bars below the values, as page.css has it
const SPARE_ROWS = 6; // above and below the visible ones
const MAX_TEXT = 300; // characters of an item in its row
const MAX_COLUMNS = 6; // values in a row

export class ResultList {
  #list;
  #window = element("div", { class: "window", role: "presentation" });
  #answer = null;
  #rows = [];
  #scale = (value) => value;
  #chosen = -1; // the item's index
  #onChoose;
  #first = -1;
  #stop = -1;
  #rowHeight = TEXT_HEIGHT + LINE_HEIGHT;

  /** @param onChoose called with a row when the user chooses it. */
  constructor(list, onChoose) {
    this.#list = list;
    this.#onChoose = onChoose;
    list.append(this.#window);
    list.addEventListener("scroll", () => this.#draw(), { passive: true });
    list.addEventListener("keydown", (event) => this.#onKey(event));
    list.addEventListener("click", (event) => this.#onClick(event));
    new ResizeObserver(() => this.#fit()).observe(list);
  }

  /** Show these rows of an answer, from the top. */
  show(answer, rows, chosen) {
    this.#answer = answer;
    this.#rows = rows;
    this.#chosen = chosen;
    this.#scale = barScale(answer);
    this.#list.scrollTop = 0;
    this.#fit();
  }

  /** Rows are as high as the lines that their values need at this width. */
  #fit() {
    const { clientWidth } = this.#list;
    const numValues = Math.min(this.#answer?.columns.length ?? 1, MAX_COLUMNS);
    const room = clientWidth < NARROW ? clientWidth - 64 : 0.74 * clientWidth - 86;
    const perLine = Math.max(1, Math.floor((room + VALUE_GAP) / (VALUE_WIDTH + VALUE_GAP)));
    this.#rowHeight = TEXT_HEIGHT + LINE_HEIGHT * Math.ceil(numValues / perLine);
    const height = this.#rows.length * this.#rowHeight;
    this.#list.style.setProperty("--row-height", `${this.#rowHeight}px`);
    this.#window.style.height = `${height}px`;
    this.#list.style.maxHeight = `${height + 2}px`; // a short list is not taller than its rows
    this.#draw(true);
  }

  #onKey(event) {
    const at = this.#rows.findIndex((row) => row.index === this.#chosen);
    const page = Math.max(1, Math.floor(this.#list.clientHeight / this.#rowHeight) - 1);
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0,
      End: this.#rows.length - 1 };
    if (!(event.key in steps) || !this.#rows.length) return;
    event.preventDefault();
    this.#choose(Math.min(this.#rows.length - 1, Math.max(0, steps[event.key])));
  }

  #onClick(event) {
    const row = event.target.closest("[role=option]");
    if (row) this.#choose(Number(row.dataset.position));
  }

  #choose(position) {
    this.#chosen = this.#rows[position].index;
    const [top, bottom] = [position * this.#rowHeight, (position + 1) * this.#rowHeight];
    const list = this.#list;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
    this.#draw(true);
    this.#onChoose(this.#rows[position]);
  }

  #draw(isNew = false) {
    const { scrollTop, clientHeight } = this.#list;
    const first = Math.max(0, Math.floor(scrollTop / this.#rowHeight) - SPARE_ROWS);
    const stop = Math.min(this.#rows.length, Math.ceil((scrollTop + clientHeight) / this.#rowHeight) + SPARE_ROWS);
    if (!isNew && first === this.#first && stop === this.#stop) return;
    [this.#first, this.#stop] = [first, stop];
    this.#window.replaceChildren(...this.#rows.slice(first, stop).map((row, i) => this.#row(row, first + i)));
    const chosen = this.#window.querySelector("[aria-selected=true]");
    if (chosen) this.#list.setAttribute("aria-activedescendant", chosen.id);
    else this.#list.removeAttribute("aria-activedescendant");
  }

  #row(row, position) {
    const node = element("div", {
      class: "row",
      role: "option",
      id: `item-${row.index}`,
      "data-position": position,
      "aria-posinset": position + 1,
      "aria-setsize": this.#rows.length,
      "aria-selected": row.index === this.#chosen ? "true" : "false",
    }, element("span", { class: "rank" }, String(row.rank)),
    element("span", { class: "text" }, row.text.slice(0, MAX_TEXT) || "(empty)"),
    element("span", { class: "values" }, ...this.#values(row)),
    ...(row.values ? [bar(this.#scale(row.values[0]))] : []));
    node.style.top = `${position * this.#rowHeight}px`;
    return node;
  }

  #values(row) {
    if (!row.values) return [element("span", { class: "failed" }, row.error ?? "no score")];
    const shown = row.values.slice(0, MAX_COLUMNS).map((value, column) => (
      element("span", {}, element("span", { class: "name" }, this.#answer.columns[column].trim()), " ",
        element("span", { class: "figure" }, shortNumber(value)))
    ));
    return shown;
  }
}
