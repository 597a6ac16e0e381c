"""docs/cli.md is what the program prints: the snapshot of all help pages."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_make_docs_would_write() -> None:
    render = runpy.run_path(str(DOCS / "write_cli_page.py"))["render"]
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == render(), "run `make docs`"
