"""Writes docs/cli.md from the program's own --help, so that the page cannot drift (`make docs`; a test compares)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
        name = " ".join(("itemwise", *verb))
        parts.append(f"## `{name}`\n\n```text\n{_help(verb)}\n```\n")
    return "\n".join(parts)


def _help(verb: tuple[str, ...]) -> str:
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "itemwise", *verb, "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
