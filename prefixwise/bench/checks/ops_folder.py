"""What must hold in an ops folder: the summary follows from the rows, and the rows are those of the chunk files."""

from __future__ import annotations

from prefixwise.bench.artifacts import OpsMatrix, OpsRow, OpsRunMetadata
from prefixwise.bench.checks.findings import Findings
from prefixwise.bench.checks.reading import is_file, parse_json


def check_ops_matrix(matrix: OpsMatrix, found: Findings) -> None:
    """`matrix_results.json`."""
    sizes = [row.chunk_size for row in matrix.results]
    for index, row in enumerate(matrix.results):
        where = f"results[{index}]"
        if sizes.index(row.chunk_size) != index:
            found.fail(f"{where}.chunk_size", "a size that no other row has", row.chunk_size)
        _check_figures(row, f"{where}.", found)
        _check_chunk_file(row, where, found)
    _check_summary(matrix, found)
    if not matrix.hardware.strip():
        found.warn("hardware", "what it ran on, without which figures cannot be compared", "nothing")


def check_ops_chunk(row: OpsRow, found: Findings) -> None:
    """`chunk_N.json`."""
    _check_figures(row, "", found)
    name = found.path.stem.removeprefix("chunk_")
    if name.isdecimal():
        found.same("chunk_size", int(name), row.chunk_size, "by the file's name")


def check_ops_metadata(metadata: OpsRunMetadata, found: Findings) -> None:
    """`run_metadata.json`."""
    if metadata.model is None and not (metadata.server_config or {}).get("model"):
        found.warn("model", "the model that was served", "nothing")
    if metadata.chunk_sizes is not None and len(set(metadata.chunk_sizes)) != len(metadata.chunk_sizes):
        found.fail("chunk_sizes", "every size once", metadata.chunk_sizes)


def _worked(row: OpsRow) -> bool:
    """By its figures: tools have several words for it."""
    return row.throughput_items_per_sec is not None and not row.error


def _check_figures(row: OpsRow, where: str, found: Findings) -> None:
    if row.status == "ok" and not _worked(row):
        found.fail(f"{where}status", "ok only with a throughput and without an error", row.status)
    if row.throughput_items_per_sec is not None and row.throughput_items_per_sec <= 0:
        found.fail(f"{where}throughput_items_per_sec", "more than 0", row.throughput_items_per_sec)
    if not _worked(row):
        found.warn(f"{where}status", "ok", f"{row.status}: {row.error}")
    low, high = row.latency_p50_ms, row.latency_p99_ms
    if low is not None and high is not None and low > high:
        found.fail(f"{where}latency_p99_ms", f"at least latency_p50_ms, {low:g}", f"{high:g}")


def _check_chunk_file(row: OpsRow, where: str, found: Findings) -> None:
    file = found.path.parent / f"chunk_{row.chunk_size}.json"
    if not is_file(file):
        return
    try:
        own = parse_json(file.read_bytes())
    except (ValueError, OSError):
        return  # it is checked on its own
    if isinstance(own, dict) and "throughput_items_per_sec" in own:
        got, expected = row.throughput_items_per_sec, own["throughput_items_per_sec"]
        found.same(f"{where}.throughput_items_per_sec", expected, got, f"in {file.name}")


def _check_summary(matrix: OpsMatrix, found: Findings) -> None:
    summary, rows = matrix.summary, matrix.results
    worked = {row.chunk_size: row.throughput_items_per_sec for row in rows if _worked(row)}
    found.same("summary.total_configs_tested", len(rows), summary.total_configs_tested, "the rows")
    found.same("summary.successful_configs", len(worked), summary.successful_configs, "the rows that worked")
    best = max((value for value in worked.values() if value is not None), default=None)
    found.close("summary.best_throughput", best, summary.best_throughput, "the highest of the rows that worked")
    sizes = [size for size, value in worked.items() if value == best]
    is_best = summary.best_chunk_size in sizes if sizes else summary.best_chunk_size is None
    if not is_best:
        expected = f"{' or '.join(map(str, sizes)) or None} (of the highest throughput)"
        found.fail("summary.best_chunk_size", expected, summary.best_chunk_size)
