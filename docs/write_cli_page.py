"""Writes docs/cli.md from the program's own --help, so that the page cannot drift (`make docs`; a test compares)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_group

from prefixwise.cli.main import app

WIDTH = 78  # of the help on a terminal of 80 columns
PAGE = Path(__file__).parent / "cli.md"
INTRODUCTION = """# Command line

`prefixwise VERB --help` prints a section of this page; `-h` is the same. `make docs` writes it.

- Results go to stdout, messages and progress to stderr. `--json` writes one line of JSON. The verbs of `bench`,
  `validate` and `ops` also write it without the option if stdout is no terminal, as the last line.
- `--url URL` of `score`, `rerank` and `batch` asks a server that is running, so that the model is loaded once.
  `--api-key`, or the variable `PREFIXWISE_API_KEY`, has its key.
- `score` and `rerank` read CSV, TSV, JSON Lines and Parquet (`--items-file`, `--documents-file`), and write them
  (`--output`). The first row of CSV and TSV has the names of the columns.
- `prefixwise completion bash`, `zsh` or `fish` prints a completion script.

| status | |
|---|---|
| 0 | success |
| 1 | a request, a model, a device or a file is at fault |
| 2 | the command line is wrong |
| 130 | interrupted with Ctrl-C |
| 141 | the reader of the output has closed the pipe |

Former names of options work and print a note: `--top-n` is `--top`, `--base-url` is `--url`, `--labels` is
`--label-token-ids`, and `--delimiter` is `--delimiter-token-id`.
"""


def help_pages() -> Iterator[tuple[tuple[str, ...], str]]:
    """The words of every verb and its help; a group comes before its verbs, the program itself, (), first."""
    return _pages((), get_group(app).make_context("prefixwise", [], resilient_parsing=True, terminal_width=WIDTH))


def _pages(words: tuple[str, ...], context: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    yield words, context.get_help() + "\n"
    for name, verb in getattr(context.command, "commands", {}).items():
        yield from _pages((*words, name), verb.make_context(name, [], parent=context, resilient_parsing=True))


def render() -> str:
    """The whole page."""
    sections = [f"## `{' '.join(('prefixwise', *words))}`\n\n```text\n{text}```\n" for words, text in help_pages()]
    return "\n".join([INTRODUCTION, *sections])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
