"""A report as Markdown: everything but the charts, which the HTML has."""

from __future__ import annotations

import re

from prefixwise.bench.render.document import Block, Bullets, Cell, Charts, Code, Paragraph, Report, Table, cell_of

_SPECIAL = re.compile(r"[\\`*<|\[\]]|(?<!\w)_|_(?!\w)")


def report_markdown(report: Report) -> str:
    """The whole text, which ends with a newline."""
    parts = [f"# {report.title} ({report.date})", escaped(report.verdict)]
    for section in report.sections:
        parts.append(f"## {escaped(section.title)}")
        parts += [block_text for block in section.blocks if (block_text := _block(block))]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """The text on one line, with Markdown's special characters escaped."""
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def _block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return escaped(text)
        case Bullets(items):
            return "\n".join(f"- {escaped(item)}" for item in items)
        case Code(text):
            return f"```bash\n{text}\n```"
        case Table():
            return _table(block)
        case Charts():
            return ""


def _table(table: Table) -> str:
    rule = "---:" if table.numeric else "---"
    lines = [
        [escaped(name) for name in table.header],
        ["---", *[rule] * (len(table.header) - 1)],
        *([_cell(cell_of(value)) for value in row] for row in table.rows),
    ]
    return f"{escaped(table.caption)}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: Cell) -> str:
    if cell.tone == "code":
        return code_span(cell.text)
    return f"**{escaped(cell.text)}**" if cell.tone == "bad" else escaped(cell.text)


def code_span(text: str) -> str:
    """A code span; a bar is escaped, as it would end a cell."""
    text = " ".join(text.split()).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"
