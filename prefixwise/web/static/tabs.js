/** Tabs with the ARIA roles and keys of the tab pattern. */
import { byId } from "./dom.js";

/** @param onShow called with the name of the shown tab. Returns `show(name)`. */
export function makeTabs(list, onShow) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const nameOf = (tab) => tab.id.replace("tab-", "");

  function show(name) {
    const wanted = tabs.some((tab) => nameOf(tab) === name) ? name : nameOf(tabs[0]);
    for (const tab of tabs) {
      const isShown = nameOf(tab) === wanted;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !isShown;
    }
    onShow(wanted);
  }

  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) show(nameOf(tab));
  });
  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    const tab = tabs[(next + tabs.length) % tabs.length];
    tab.focus();
    show(nameOf(tab));
  });
  return show;
}
