"""`prefixwise ops`: a sweep over the server's chunk sizes, one chunk size of it, the metadata of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import AliasChoices, ConfigDict, Field

from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.findings import Findings, is_file, parse_json
from prefixwise.bench.render.document import NONE, Block, Card, Cell, Charts, Report, Section, table
from prefixwise.bench.render.numbers import short_number
from prefixwise.bench.render.svg import line_chart

OPS_MATRIX_VERSION: Literal["1.0"] = "1.0"


class OpsRow(Artifact):
    """One chunk size of the server."""

    chunk_size: int = Field(ge=0)
    # The earlier system leaves out what it does not know: of a failed size all metrics, of one that worked the status.
    throughput_items_per_sec: float | None = None
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None
    memory_peak_mb: float | None = None
    status: str | None = None
    error: str | None = None
    # Of ours: the latencies behind the metrics, and the kind of the failure.
    latencies_ms: list[float] | None = None
    failure_reason: str | None = None


class OpsServerConfig(Artifact):
    """How the servers were started."""

    model: str
    multi_item_mask_impl: str
    multi_item_segment_fallback_threshold: int


class OpsSummary(Artifact):
    """The best of it."""

    best_chunk_size: int | None
    best_throughput: float | None
    total_configs_tested: int
    successful_configs: int


class OpsMatrix(Artifact):
    """`matrix_results.json`."""

    schema_version: Literal["1.0"]
    backend: str
    hardware: str
    server_config: OpsServerConfig
    workload_ref: str
    results: list[OpsRow]
    summary: OpsSummary


class OpsWorkload(Artifact):
    """Its geometry."""

    query_tokens: int
    num_items: int
    item_tokens: int
    label_token_ids: list[int]


class OpsRunMetadata(Artifact):
    """`run_metadata.json`: what it was run with. prefixwise 0.1 wrote neither version, run id nor workload."""

    schema_version: Literal["1.0"] | None = None
    run_id: str | None = None
    model: str | None = None
    backend: str | None = None
    hardware: str | None = None
    workload: OpsWorkload | None = None
    server_config: dict[str, Any] | None = None
    chunk_sizes: list[int] | None = None
    timestamp_start: str | None = Field(
        default=None, validation_alias=AliasChoices("timestamp_start", "started_at_utc")
    )
    timestamp_end: str | None = None  # of the last row
    # Of ours: the whole of what was asked for, so that only the same sweep is gone on with.
    workload_ref: str | None = None
    spec: dict[str, Any] | None = None
    prefixwise: str | None = None

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, populate_by_name=True)


def check_ops_matrix(matrix: OpsMatrix, found: Findings) -> None:
    """`matrix_results.json`."""
    sizes = [row.chunk_size for row in matrix.results]
    for index, row in enumerate(matrix.results):
        where = f"results[{index}]"
        if sizes.index(row.chunk_size) != index:
            found.fail(f"{where}.chunk_size", "a size that no other row has", row.chunk_size)
        _check_metrics(row, f"{where}.", found)
        _check_chunk_file(row, where, found)
    _check_summary(matrix, found)
    if not matrix.hardware.strip():
        found.warn("hardware", "what it ran on, without which metrics cannot be compared", "nothing")


def check_ops_chunk(row: OpsRow, found: Findings) -> None:
    """`chunk_N.json`."""
    _check_metrics(row, "", found)
    name = found.path.stem.removeprefix("chunk_")
    if name.isdecimal():
        found.same("chunk_size", int(name), row.chunk_size, "by the file's name")


def check_ops_metadata(metadata: OpsRunMetadata, found: Findings) -> None:
    """`run_metadata.json`."""
    if metadata.model is None and not (metadata.server_config or {}).get("model"):
        found.fail("model", "the model that was served", "nothing")
    if metadata.chunk_sizes is not None and len(set(metadata.chunk_sizes)) != len(metadata.chunk_sizes):
        found.fail("chunk_sizes", "every size once", metadata.chunk_sizes)


def _worked(row: OpsRow) -> bool:
    """Judged by its metrics: tools have several values for the status."""
    return row.throughput_items_per_sec is not None and not row.error


def _check_metrics(row: OpsRow, where: str, found: Findings) -> None:
    if row.throughput_items_per_sec is None and row.status is None:
        found.fail(f"{where}throughput_items_per_sec", "the field, or the status of a size that failed", "nothing")
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


_ROW_HEADER = ("chunk size", "items/s", "p50 (ms)", "p99 (ms)", "memory (MB)", "ended")


def ops_matrix_report(matrix: OpsMatrix, name: str = "") -> Report:
    """The report of a sweep over the server's chunk sizes."""
    best, counted = matrix.summary, f"{matrix.summary.successful_configs} of {matrix.summary.total_configs_tested}"
    phrase = f"{counted} chunk sizes of the server could be measured, model {matrix.server_config.model}."
    found, cards = "None of them answered.", list[Card]()
    if best.best_throughput is not None:
        speed = f"{short_number(best.best_throughput)} items/s"
        found = f"The fastest is {best.best_chunk_size}, with {speed}."
        cards = [Card("Throughput", speed, f"chunk size {best.best_chunk_size}")]
    facts = {"backend": matrix.backend, "hardware": matrix.hardware, "workload": matrix.workload_ref}
    settings = {**facts, **matrix.server_config.model_dump()}
    rows = [(key, str(value)) for key, value in settings.items()]
    sections = (
        Section("Sweep", (*_charts(matrix), *ops_rows_table("Every chunk size", matrix.results))),
        Section("Server", table("As it was started", ("setting", "value"), rows, numeric=False)),
    )
    passed = None if best.best_throughput is None else True
    return Report(f"Sweep on a target: {matrix.backend}", NONE, passed, (phrase, found), tuple(cards), sections)


def ops_rows_table(caption: str, rows: Sequence[OpsRow], *, with_errors: bool = True) -> tuple[Block, ...]:
    """A row for each chunk size."""
    return table(caption, _ROW_HEADER, [_cells(row, with_errors) for row in rows])


def _charts(matrix: OpsMatrix) -> tuple[Block, ...]:
    speeds = {row.chunk_size: row.throughput_items_per_sec for row in matrix.results if row.throughput_items_per_sec}
    times = {row.chunk_size: row.latency_p50_ms for row in matrix.results if row.latency_p50_ms}
    drawn = []
    across = "chunk size of the server"
    if speeds:
        title, caption = "Throughput by chunk size", "Higher is better."
        drawn.append(
            line_chart("speed", title, speeds, across=across, up="items per second", unit="items/s", caption=caption)
        )
    if times:
        title, caption = "Latency by chunk size", "Half of the requests took no longer; lower is better."
        drawn.append(
            line_chart("latency", title, times, across=across, up="milliseconds (p50)", unit="ms", caption=caption)
        )
    return (Charts(tuple(drawn)),) if drawn else ()


def _cells(row: OpsRow, with_errors: bool) -> tuple[Cell | str, ...]:
    values = (row.throughput_items_per_sec, row.latency_p50_ms, row.latency_p99_ms, row.memory_peak_mb)
    is_ok = row.status in ("ok", None) and _worked(row)
    status = row.status or ("ok" if is_ok else NONE)
    ended = status if is_ok or row.error is None or not with_errors else f"{status}: {row.error}"
    return str(row.chunk_size), *map(short_number, values), Cell(ended, "good" if is_ok else "bad")
