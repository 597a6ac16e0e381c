"""A report as one HTML file: style and plots inside, no script, nothing to fetch."""

from __future__ import annotations

from html import escape

from prefixwise.bench.report.document import (
    NONE,
    Block,
    Bullets,
    Card,
    Cell,
    Code,
    Figure,
    Figures,
    Paragraph,
    Report,
    Section,
    Table,
    cell_of,
)
from prefixwise.bench.report.style import STYLE

_TONES = {True: "good", False: "bad", None: "open"}


def report_html(report: Report) -> str:
    """The whole file."""
    names = [f"section-{index}" for index in range(1, len(report.sections) + 1)]
    links = "".join(
        f'<li><a href="#{name}">{escape(section.title)}</a></li>'
        for name, section in zip(names, report.sections, strict=True)
    )
    sections = "\n".join(_section(name, section) for name, section in zip(names, report.sections, strict=True))
    title = escape(report.title)
    statements = "".join(f"<p>{escape(each)}</p>" for each in report.statements)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}{"" if report.date == NONE else f" ({escape(report.date)})"}</title>
<style>
{STYLE}</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
{_date(report.date)}
<div class="verdict {_TONES[report.passed]}">{statements}</div>
<dl class="cards">{"".join(map(_card, report.cards))}</dl>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
{sections}
</main>
</body>
</html>
"""


def _date(date: str) -> str:
    """Some artifacts do not say it."""
    return "" if date == NONE else f'<p class="date"><time datetime="{escape(date)}">{escape(date)}</time></p>'


def _card(card: Card) -> str:
    """The name is read before the value, and stands above it."""
    return (
        f'<div class="card {card.tone}"><dt>{escape(card.name)}</dt>'
        f'<dd class="value">{escape(card.value)}</dd><dd class="detail">{escape(card.detail)}</dd></div>'
    )


def _section(name: str, section: Section) -> str:
    blocks = "\n".join(map(_block, section.blocks))
    heading = f'<h2 id="{name}-heading">{escape(section.title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-heading">\n{heading}\n{blocks}\n</section>'


def _block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
        case Code(text):
            return f'<pre tabindex="0" aria-label="Commands"><code>{escape(text)}</code></pre>'
        case Table():
            return _table(block)
        case Figures(figures):
            return f'<div class="figures">{"".join(map(_figure, figures))}</div>'


def _figure(figure: Figure) -> str:
    title = f'<p class="figure-title" aria-hidden="true">{escape(figure.title)}</p>'  # the picture says it itself
    return f"<figure>{title}{figure.svg}<figcaption>{escape(figure.caption)}</figcaption></figure>"


def _table(table: Table) -> str:
    """In a box of its own, which scrolls where the table is wider than the page."""
    header = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    rows = "\n".join(f"<tr>{_row(tuple(map(cell_of, row)))}</tr>" for row in table.rows)
    caption = escape(table.caption)
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0">\n'
        f'<table class="{"numbers" if table.numeric else "words"}">\n<caption><span>{caption}</span></caption>\n'
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _row(cells: tuple[Cell, ...]) -> str:
    first, *others = cells
    return f'<th scope="row">{_inside(first)}</th>' + "".join(
        f'<td class="{cell.tone}">{_inside(cell)}</td>' for cell in others
    )


def _inside(cell: Cell) -> str:
    return f"<code>{escape(cell.text)}</code>" if cell.tone == "code" else escape(cell.text)
