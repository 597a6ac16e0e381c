"""How the HTML report looks: on a phone, on a wide screen, on paper; light and dark.

The two backends have the blue and the orange that people with any colour vision can tell apart, and different marks.
"""

STYLE = """\
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1b1f24; --faint: #59636e; --rule: #d5dae0; --box: #f5f7f9;
  --jax: #0072b2; --pytorch: #c24e00; --good: #11683a; --bad: #b3261e; --bad-box: #fdeceb; --good-box: #eaf6ee;
  --open: #7a5600; --open-box: #fff6df;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161b; --text: #e6eaef; --faint: #a3adb8; --rule: #36404a; --box: #1b2128;
    --jax: #56b4e9; --pytorch: #f0a030; --good: #6fd08c; --bad: #ff8a80; --bad-box: #38201f; --good-box: #182a1f;
    --open: #e8c46a; --open-box: #2e2817;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; overflow-wrap: break-word; }
main { max-width: 1120px; margin: 0 auto; padding: 1.25rem 1rem 4rem; }
h1 { font-size: clamp(1.5rem, 5vw, 2.1rem); line-height: 1.2; margin: 0; text-wrap: balance; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.75rem 0 .75rem; padding-top: .9rem;
  border-top: 1px solid var(--rule); }
p, ul { margin: .75rem 0; max-width: 70ch; }
a { color: var(--jax); }
.date { color: var(--faint); margin: .25rem 0 1rem; }
.verdict { font-size: 1.06rem; max-width: none; padding: .9rem 1.1rem; border-left: 5px solid var(--good);
  border-radius: 4px; background: var(--good-box); }
.verdict p { margin: 0; max-width: none; }
.verdict p + p { margin-top: .45rem; }
.verdict.bad { border-left-color: var(--bad); background: var(--bad-box); }
.verdict.open { border-left-color: var(--open); background: var(--open-box); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(155px, 1fr)); gap: .75rem; margin: 1.1rem 0; }
.card { padding: .7rem .9rem; border: 1px solid var(--rule); border-radius: 8px; background: var(--box); }
.card dt { color: var(--faint); font-size: .9rem; }
.card dd { margin: 0; }
.card .value { font-size: 1.5rem; font-weight: 650; line-height: 1.35; }
.card .detail { color: var(--faint); font-size: .9rem; line-height: 1.4; white-space: pre-line; }
.card.good .value, td.good { color: var(--good); }
.card.bad .value, td.bad { color: var(--bad); }
.card.open .value, td.open { color: var(--open); }
td.good, td.bad { font-weight: 650; }
nav ul { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; list-style: none; padding: 0; max-width: none; }
nav a { display: inline-block; padding: .35rem 0; }
.scroll { overflow-x: auto; margin: 1rem 0; border: 1px solid var(--rule); border-radius: 8px; }
.scroll:focus-visible, pre:focus-visible { outline: 2px solid var(--jax); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .94rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .65rem .8rem; }
caption span { position: sticky; left: .8rem; display: inline-block; max-width: calc(100vw - 4rem); }
th, td { padding: .42rem .62rem; border-top: 1px solid var(--rule); text-align: left; vertical-align: top; }
thead th { vertical-align: bottom; background: var(--box); font-weight: 600; font-size: .94em; line-height: 1.35; }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--page); }
.numbers td, .numbers thead th:not(:first-child) { text-align: right; }
.numbers td { white-space: nowrap; }
.words td { min-width: 7rem; }
.words tbody th { min-width: 7rem; max-width: 45vw; }
tbody tr:hover > * { background: var(--box); }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .86em; }
td code { overflow-wrap: anywhere; }
pre { overflow-x: auto; margin: 1rem 0; padding: .9rem 1rem; border: 1px solid var(--rule); border-radius: 8px;
  background: var(--box); line-height: 1.5; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1.25rem;
  margin: 1rem 0; }
figure { margin: 0; max-width: 560px; }
.figure-title { margin: 0 0 .35rem; font-weight: 600; font-size: 1rem; line-height: 1.35; max-width: none; }
figcaption { color: var(--faint); font-size: .9rem; line-height: 1.45; margin-top: .25rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--text); font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
svg .axis-title, svg .nothing, svg .small { fill: var(--faint); }
svg .small { font-size: 12px; }
svg .lane { font-weight: 600; }
svg .axis { stroke: var(--faint); fill: none; }
svg .grid { stroke: var(--rule); fill: none; }
svg .jax { --own: var(--jax); }
svg .pytorch { --own: var(--pytorch); }
svg .failed { --own: var(--faint); }
svg .bound { --own: var(--bad); }
svg .failed.jax { --own: var(--jax); }
svg .failed.pytorch { --own: var(--pytorch); }
svg .difference, svg .largest { --own: var(--text); }
svg .mean { --own: var(--faint); }
svg .line { fill: none; stroke: var(--own); stroke-width: 2; stroke-linejoin: round; }
svg .mark { fill: var(--own); stroke: var(--page); stroke-width: 1; }
svg .mark.hollow { fill: var(--page); stroke: var(--own); stroke-width: 2; }
svg .cross { fill: none; stroke: var(--own); stroke-width: 2.5; stroke-linecap: round; }
svg .level { fill: none; stroke: var(--own); stroke-width: 1.5; stroke-dasharray: 5 4; }
svg text.level-name { fill: var(--own); paint-order: stroke; stroke: var(--page); stroke-width: 4px; font-size: 12px; }
svg .box { fill: var(--own); fill-opacity: .16; stroke: var(--own); stroke-opacity: .5; }
svg .median { fill: none; stroke: var(--own); stroke-width: 3; }
svg .dots { fill: none; stroke: var(--own); stroke-width: 5; stroke-linecap: round; stroke-opacity: .55; }
@media print {
  :root {
    --page: #ffffff; --text: #000000; --faint: #444444; --rule: #bbbbbb; --box: #ffffff;
    --jax: #0072b2; --pytorch: #c24e00; --good: #11683a; --bad: #b3261e; --bad-box: #ffffff; --good-box: #ffffff;
    --open: #7a5600; --open-box: #ffffff;
  }
  @page { margin: 14mm; }
  html { font-size: 10pt; }
  body { font-size: 1rem; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  h2 { break-after: avoid; margin-top: 1.5rem; }
  figure, .card, tr, .verdict { break-inside: avoid; }
  caption, thead, .figure-title { break-after: avoid; }
  thead { display: table-header-group; }
  .cards { grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); }
  .card .value { font-size: 1.25rem; }
  .figures { grid-template-columns: 1fr 1fr; }
  .scroll, pre { overflow: visible; border: 0; }
  .scroll table { font-size: 7.5pt; }
  caption { padding: .3rem .35rem; }
  caption span { position: static; max-width: none; }
  th, td { padding: .2rem .3rem; }
  tbody th { position: static; }
  p, ul { max-width: none; }
  .words td, .words tbody th { min-width: 0; }
  pre { white-space: pre-wrap; padding: 0; font-size: 7.5pt; }
}
"""
