"""The folder of a run: `dense-matrix-<UTC timestamp>/` with one file for every chunk size, and their summary.

run_metadata.json  matrix_results.json  chunk_N.json  chunk_N.log  server.log  workload.json
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from prefixwise.bench.files import Kind, parse_artifact, read_artifact, read_bytes, write_artifact
from prefixwise.bench.kinds.ops import OPS_MATRIX_VERSION, OpsMatrix, OpsRow, OpsServerConfig, OpsSummary
from prefixwise.bench.remote.spec import SweepSpec
from prefixwise.contract.errors import ArtifactError

METADATA = "run_metadata.json"
RESULTS = "matrix_results.json"
WORKLOAD = "workload.json"  # of a sweep
CANONICAL_WORKLOAD = "canonical_workload.json"  # of a comparison
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CHUNK = re.compile(r"chunk_(\d+)\.json")


def check_name(name: str) -> str:
    """Check the name of a run. Raises ArtifactError."""
    if not _NAME.fullmatch(name):
        raise ArtifactError(f"the name of a run must consist of letters, digits, dots and dashes, got {name!r}")
    return name


def new_name(kind: str) -> str:
    """dense-matrix-20260212T120000Z"""
    return f"{kind}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"


def make_new(folder: Path) -> Path:
    """Create the folder, or NAME-2 if it exists: names have a resolution of a second."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    names, made = count(2), folder
    while True:
        try:
            made.mkdir()
        except FileExistsError:
            made = folder.with_name(f"{folder.name}-{next(names)}")
        else:
            return made


def read_or_set_aside(path: Path, kind: type[Kind], say: Callable[[str], None]) -> Kind | None:
    """The artifact, or None if there is none. An invalid file is renamed to NAME.broken, reported, and None returned.

    A full disk or an interrupted copy leaves such files. Raises ArtifactError if the file cannot be read.
    """
    if not path.exists():
        return None
    content = read_bytes(path)
    try:
        return parse_artifact(content, kind, str(path))
    except ArtifactError as error:
        set_aside(path, str(error), say)
        return None


def set_aside(path: Path, why: str, say: Callable[[str], None]) -> None:
    """Rename the file to NAME.broken and report why."""
    broken = path.with_name(f"{path.name}.broken")
    path.replace(broken)
    say(f"{why}; renamed to {broken.name}, and written again")


def chunk_file(folder: Path, size: int) -> Path:
    """The file of this chunk size's row."""
    return folder / f"chunk_{size}.json"


def finished_row(folder: Path, size: int) -> OpsRow | None:
    """The successful row of an earlier run; a failed row is measured again."""
    try:
        row = read_artifact(chunk_file(folder, size), OpsRow)
    except ArtifactError:
        return None
    return row if row.status == "ok" and row.chunk_size == size else None


def rows_in(folder: Path) -> list[OpsRow]:
    """All rows in the folder, of any call, by chunk size; invalid files are skipped."""
    sizes = sorted({int(found[1]) for path in folder.iterdir() if (found := _CHUNK.fullmatch(path.name))})
    return [row for size in sizes if (row := _row(folder, size)) is not None]


def write_results(folder: Path, spec: SweepSpec, backend: str, hardware: str) -> OpsMatrix:
    """Summarize all chunk files in the folder, including those of earlier calls."""
    rows = rows_in(folder)
    succeeded = [(row.throughput_items_per_sec, -row.chunk_size) for row in rows if row.throughput_items_per_sec]
    best = max(succeeded, default=None)
    matrix = OpsMatrix(
        schema_version=OPS_MATRIX_VERSION,
        backend=backend,
        hardware=hardware,
        server_config=OpsServerConfig(
            model=spec.model,
            multi_item_mask_impl=spec.mask,
            multi_item_segment_fallback_threshold=spec.segment_fallback_threshold,
        ),
        workload_ref=spec.workload_ref,
        results=rows,
        summary=OpsSummary(
            best_chunk_size=None if best is None else -best[1],
            best_throughput=None if best is None else best[0],
            total_configs_tested=len(rows),
            successful_configs=len(succeeded),
        ),
    )
    write_artifact(folder / RESULTS, matrix)
    return matrix


def _row(folder: Path, size: int) -> OpsRow | None:
    try:
        return read_artifact(chunk_file(folder, size), OpsRow)
    except ArtifactError:
        return None


def runs_in(root: Path) -> list[dict[str, object]]:
    """Runs by name, with the number of files, their size, and whether there is a result."""
    if not root.is_dir():
        return []
    found = []
    for folder in sorted(each for each in root.iterdir() if each.is_dir() and _NAME.fullmatch(each.name)):
        files = [each for each in folder.rglob("*") if each.is_file()]
        found.append(
            {
                "name": folder.name,
                "files": len(files),
                "bytes": sum(each.stat().st_size for each in files),
                "finished": any((folder / name).exists() for name in (RESULTS, "comparison.json")),
            }
        )
    return found
