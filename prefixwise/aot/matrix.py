"""The matrix: one program of the contract workload for each model, slice and case, in a file that is whole after every
row, and as a table with one line per model and slice."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixwise.aot.options import MATRIX_CASES, AotOptions, MatrixCase
from prefixwise.aot.report import Json, Table, program_json, slice_json
from prefixwise.aot.run import record
from prefixwise.contract.errors import ArtifactError
from prefixwise.host import replacing

LEGEND = "HBM of one chip in GiB, and the estimated time of one run in ms, from the program's FLOPs and bytes"
_ROW_FIELDS = {"model", "topology", "case", "outcome"}


@dataclass
class MatrixFile:
    """Rows of one program each, and the versions that compiled them."""

    path: Path
    rows: list[Json]

    @classmethod
    def open(cls, path: Path) -> MatrixFile:
        """Read the file; it may not exist yet. Raises ArtifactError where it holds something else."""
        if not path.exists():
            return cls(path, [])
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            return cls(path, [row for row in rows if row.keys() >= _ROW_FIELDS])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ArtifactError(f"{path} must be a file of `prefixwise aot matrix`, or not exist yet") from None

    def find(self, model: str, topology: str, case: MatrixCase) -> Json | None:
        """None where the program was not compiled yet."""
        wanted = (model, topology, case.name)
        return next((row for row in self.rows if (row["model"], row["topology"], row["case"]) == wanted), None)

    def add(self, row: Json, versions: dict[str, str]) -> None:
        """Add one row and write the file at once. Raises ArtifactError where it cannot be written."""
        self.rows.append({**row, "versions": versions})
        lines = ",\n".join(json.dumps(each) for each in self.rows)
        try:
            command = json.dumps(f"prefixwise {shlex.join(sys.argv[1:])}")
            with replacing(self.path) as temporary:
                temporary.write_text(f'{{"command": {command}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be written: {error.strerror}") from None


def matrix_row(model: str, topology: str, case: MatrixCase) -> Json:
    """Compile the case's program."""
    run = record(AotOptions(model=model, topology=topology, **case.options))
    of_kind = [needed for needed in run.programs() if needed.spec.kind == case.kind]
    largest = max(of_kind, key=lambda needed: needed.num_tokens)
    report = run.compile([largest], lambda done, total, title: None)[0]
    return {"model": model, "topology": topology, "case": case.name, **program_json(report), "slice": slice_json(run)}


def matrix_table(rows: Sequence[Json]) -> Table:
    """One line per model and slice, one column per case."""
    found = {(row["model"], row["topology"], row["case"]): row for row in rows}
    pairs = dict.fromkeys((row["model"], row["topology"]) for row in rows)
    header = ["model", "slice", *(case.name for case in MATRIX_CASES)]
    return [header, *([*pair, *(_cell(found.get((*pair, case.name))) for case in MATRIX_CASES)] for pair in pairs)]


def matrix_markdown(rows: Sequence[Json]) -> str:
    """The table as Markdown."""
    header, *lines = matrix_table(rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ["---"] * len(header), *lines])


def matrix_failures(rows: Sequence[Json]) -> list[str]:
    """Why programs do not compile, one line each."""
    failed = [row for row in rows if row["outcome"] != "compiles"]
    return [f"{row['model']} on {row['topology']}, {row['case']}: {row['reason']}" for row in failed]


def _cell(row: Json | None) -> str:
    if row is None:
        return "-"
    if row["outcome"] != "compiles":
        return str(row["outcome"])
    return f"{row['hbm_bytes']['total'] / 2**30:.1f}, {1000 * row['estimated_seconds'] / row['runs']:.1f} ms"
