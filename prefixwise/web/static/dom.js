/** Small helpers for building the page. Text is always inserted as text, never as HTML. */

/** @returns {HTMLElement} the element with this id, which the page has. */
export const byId = (id) => document.getElementById(id);

/** An element with attributes, or (`text`) properties, and children that are nodes or strings. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for a part of an SVG picture. */
export function svgElement(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** A bar that is filled from 0 to 1. */
export function bar(part) {
  const inside = element("span");
  inside.style.width = `${100 * Math.min(1, Math.max(0, part))}%`;
  return element("span", { class: "bar", "aria-hidden": "true" }, inside);
}

/** A table in a box that scrolls by itself. Cells are strings, numbers or nodes; those of the first column may be headers. */
export function table(caption, header, rows, { hasRowHeaders = false } = {}) {
  const isNumber = (column) => rows.length > 0 && typeof rows[0][column] === "number";
  const head = element("tr", {}, ...header.map((name, column) => (
    name ? element("th", { scope: "col", class: isNumber(column) ? "number" : null }, name) : element("td")
  )));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, column) => (
    hasRowHeaders && column === 0 ? element("th", { scope: "row" }, cell) : tableCell(cell)))));
  const whole = element("table", {}, element("caption", {}, caption), element("thead", {}, head),
    element("tbody", {}, ...body));
  return element("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, whole);
}

function tableCell(cell) {
  const isNumber = typeof cell === "number";
  return element("td", { class: isNumber ? "number" : null }, isNumber ? shortNumber(cell) : cell);
}

/** "1 item", "5,000 items". */
export const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** Scroll to an element if it is not visible. */
export function bringIntoView(node) {
  const { top, bottom } = node.getBoundingClientRect();
  if (top < 0 || bottom > 0.8 * window.innerHeight) node.scrollIntoView({ block: "start" });
}

/** A number as people read it. */
export function shortNumber(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(3) : value.toFixed(size < 10 ? 4 : 2);
}

/** Runs `work` once no call has come for this long. */
export function debounced(work, milliseconds) {
  let timer;
  const soon = () => {
    soon.cancel();
    timer = setTimeout(work, milliseconds);
  };
  soon.cancel = () => clearTimeout(timer);
  return soon;
}

/** Offer text as a file. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Accept files dropped anywhere on the page; `place` is highlighted. Dragged text is ignored. */
export function takeDrops(place, onFiles) {
  const toggle = (on) => place.classList.toggle("dropping", on);
  const hasFiles = (event) => [...event.dataTransfer.types].includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    toggle(true);
  });
  document.addEventListener("dragleave", () => toggle(false));
  document.addEventListener("drop", (event) => {
    toggle(false);
    if (!hasFiles(event)) return;
    event.preventDefault();
    onFiles([...event.dataTransfer.files]);
  });
}
