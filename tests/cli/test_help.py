"""`-h` of every verb at 80 columns. docs/cli.md is the snapshot of all; tests/docs/test_cli_page.py compares it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.cli.conftest import RunMain

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages() -> dict[tuple[str, ...], str]:
    return dict(runpy.run_path(str(DOCS / "write_cli_page.py"))["help_pages"]())


def test_every_line_fits_80_columns_and_names_no_type(pages: dict[tuple[str, ...], str]) -> None:
    assert len(pages) > 30
    for words, page in pages.items():
        assert max(map(len, page.splitlines())) <= 80, words
        assert not re.search(r"<[a-z]", page), words  # as in `--help <bool>`


@pytest.mark.parametrize("words", [(), ("score",), ("bench", "matrix"), ("cluster", "serve")], ids=" ".join)
def test_a_terminal_shows_the_page_also_with_h(
    run_main: RunMain, pages: dict[tuple[str, ...], str], words: tuple[str, ...]
) -> None:
    ran = run_main(*words, "-h")
    assert (ran.status, ran.out, ran.err) == (0, pages[words], "")
    assert ran == run_main(*words, "--help")


def test_names_of_options_are_never_broken(pages: dict[tuple[str, ...], str]) -> None:
    assert "  --multi-item-segment-fallback-threshold N\n" in pages["serve",]
    assert not [line for page in pages.values() for line in page.splitlines() if re.search(r"--[a-z-]*-$", line)]


def test_a_wide_terminal_shows_the_same_help(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = run_main("serve", "-h").out
    monkeypatch.setenv("COLUMNS", "200")
    assert run_main("serve", "-h").out == narrow
