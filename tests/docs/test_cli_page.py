"""docs/cli.md names every option that the program has, and none that it has not."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def option_names(page: str) -> list[set[str]]:
    """The options of each section; layout and wording belong to the installed typer, so they are not compared."""
    sections = page.split("\n## ")
    return [set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section)) for section in sections]


def test_the_page_is_what_make_docs_would_write() -> None:
    render = runpy.run_path(str(DOCS / "write_cli_page.py"))["render"]
    written = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert option_names(render()) == option_names(written), "run `make docs`"
