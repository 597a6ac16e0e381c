"""The matrix on disk: a file that is whole after every row."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixwise.cli.aot.cases import Case
from prefixwise.cli.failures import CommandError

Row = dict[str, Any]


@dataclass
class MatrixFile:
    """Rows, each of one program, and what compiled them."""

    path: Path
    rows: list[Row]

    @classmethod
    def open(cls, path: Path) -> MatrixFile:
        """What is there, or nothing yet. Raises CommandError where it is something else."""
        if not path.exists():
            return cls(path, [])
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            return cls(path, [row for row in rows if {"model", "topology", "case", "outcome"} <= row.keys()])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise CommandError(f"{path} must be what `prefixwise aot matrix` wrote, or not there yet") from None

    def find(self, model: str, topology: str, case: Case) -> Row | None:
        """None where it is yet to be made."""
        wanted = (model, topology, case.name)
        return next((row for row in self.rows if (row["model"], row["topology"], row["case"]) == wanted), None)

    def add(self, row: Row, versions: dict[str, str]) -> None:
        """One row more, written at once. Raises CommandError where that cannot be."""
        self.rows.append({**row, "versions": versions})
        lines = ",\n".join(json.dumps(each) for each in self.rows)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_name(f".{self.path.name}.tmp")
            command = json.dumps(f"prefixwise {shlex.join(sys.argv[1:])}")
            beside.write_text(f'{{"command": {command}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
            beside.replace(self.path)
        except OSError as error:
            raise CommandError(f"{self.path} cannot be written: {error.strerror}") from None
