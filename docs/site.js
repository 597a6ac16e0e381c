/** What the theme's own elements lack for keyboards and screen readers. */
function mend() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  const version = document.querySelector(".md-version__current");
  version?.setAttribute("aria-label", `Version ${version.textContent}`); // its name says what it shows
  for (const each of document.querySelectorAll("nav.md-code__nav:not([role])")) each.setAttribute("role", "presentation");
  for (const each of document.querySelectorAll("th:empty")) each.replaceWith(document.createElement("td")); // no header
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
  }
}

new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
mend();
