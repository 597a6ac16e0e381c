"""Writes docs/cli.md from the program's own --help, so that the page cannot drift (`make docs`; a test compares)."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from prefixwise.cli.main import app

TERMINAL = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
PAGE = Path(__file__).parent / "cli.md"
BENCH = ("workload", "matrix", "compare", "report", "check", "schema", "ab", "load")
VALIDATE = ("endpoint", "combine", "gate", "models", "self")
VERBS = (
    *((), ("score",), ("rerank",), ("batch",), ("serve",), ("models",), ("profiles",)),
    *(("aot",), ("aot", "matrix")),
    *(("bench", verb) for verb in BENCH),
    *(("validate", verb) for verb in VALIDATE),
)


def render() -> str:
    """The whole page."""
    parts = ["# Command line\n\nWritten by `make docs` from `--help`.\n"]
    for verb in VERBS:
        name = " ".join(("prefixwise", *verb))
        parts.append(f"## `{name}`\n\n```text\n{_help(verb)}\n```\n")
    return "\n".join(parts)


def _help(verb: tuple[str, ...]) -> str:
    done = CliRunner().invoke(app, [*verb, "--help"], prog_name="prefixwise", env=TERMINAL, catch_exceptions=False)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
