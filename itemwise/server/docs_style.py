"""How the documentation page looks: one column, readable on a phone, light or dark as the reader's system is."""

STYLE = """
:root { color-scheme: light dark; --text: #1d2330; --back: #ffffff; --soft: #f3f5f8; --line: #d9dee7; --mark: #0b57d0; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e7ee; --back: #14171d; --soft: #1e232c; --line: #343b48; --mark: #8ab4f8; }
}
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 small { font-size: 1rem; font-weight: normal; opacity: .7; }
h2 { margin-top: 2.5rem; padding-top: 1rem; border-top: 1px solid var(--line); font-family: ui-monospace, monospace; }
h2 { font-size: 1.15rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
a { color: var(--mark); }
nav ul { list-style: none; padding: 0; display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
nav a { text-decoration: none; font-family: ui-monospace, monospace; font-size: .9rem; }
.method { display: inline-block; min-width: 3.6rem; font-weight: bold; }
code, pre { font-family: ui-monospace, monospace; font-size: .85rem; }
code { overflow-wrap: anywhere; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .7rem; overflow-x: auto; }
.example { margin: .8rem 0 .2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
td { min-width: 5rem; }
"""
