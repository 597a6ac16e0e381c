"""Reports of `prefixwise ops` and `prefixwise validate self`: a sweep on a target, a list of commands."""

from __future__ import annotations

from prefixwise.bench.artifacts import OpsMatrix, OpsRow, SelfCheck, SelfCheckStep
from prefixwise.bench.report.document import NONE, Block, Card, Cell, Figures, Report, Section, table
from prefixwise.bench.report.line_figure import line_figure
from prefixwise.bench.report.numbers import figure, milliseconds

_ROW_HEADER = ("chunk size", "items/s", "p50 (ms)", "p99 (ms)", "memory (MB)", "ended")
_ENDINGS = {0: Cell("done", "good"), 3: Cell("not run", "open")}


def ops_matrix_report(matrix: OpsMatrix) -> Report:
    """Of a sweep over the server's chunk sizes."""
    best, counted = matrix.summary, f"{matrix.summary.successful_configs} of {matrix.summary.total_configs_tested}"
    words = f"{counted} chunk sizes of the server could be measured, model {matrix.server_config.model}."
    found, cards = "None of them answered.", list[Card]()
    if best.best_throughput is not None:
        speed = f"{figure(best.best_throughput)} items/s"
        found = f"The fastest is {best.best_chunk_size}, with {speed}."
        cards = [Card("Throughput", speed, f"chunk size {best.best_chunk_size}")]
    facts = {"backend": matrix.backend, "hardware": matrix.hardware, "workload": matrix.workload_ref}
    settings = {**facts, **matrix.server_config.model_dump()}
    rows = [(key, str(value)) for key, value in settings.items()]
    sections = (
        Section("Sweep", (*_figures(matrix), *table("Every chunk size", _ROW_HEADER, list(map(_row, matrix.results))))),
        Section("Server", table("As it was started", ("setting", "value"), rows, numeric=False)),
    )
    passed = None if best.best_throughput is None else True
    return Report(f"Sweep on a target: {matrix.backend}", NONE, passed, (words, found), tuple(cards), sections)


def _figures(matrix: OpsMatrix) -> tuple[Block, ...]:
    speeds = {row.chunk_size: row.throughput_items_per_sec for row in matrix.results if row.throughput_items_per_sec}
    times = {row.chunk_size: row.latency_p50_ms for row in matrix.results if row.latency_p50_ms}
    drawn = []
    across = "chunk size of the server"
    if speeds:
        title, caption = "Throughput by chunk size", "Higher is better."
        drawn.append(
            line_figure("speed", title, speeds, across=across, up="items per second", unit="items/s", caption=caption)
        )
    if times:
        title, caption = "Latency by chunk size", "Half of the requests took no longer; lower is better."
        drawn.append(
            line_figure("latency", title, times, across=across, up="milliseconds (p50)", unit="ms", caption=caption)
        )
    return (Figures(tuple(drawn)),) if drawn else ()


def _row(row: OpsRow) -> tuple[Cell | str, ...]:
    values = (row.throughput_items_per_sec, row.latency_p50_ms, row.latency_p99_ms, row.memory_peak_mb)
    is_ok = row.status == "ok"
    ended = row.status if is_ok or row.error is None else f"{row.status}: {row.error}"
    return str(row.chunk_size), *map(figure, values), Cell(ended, "good" if is_ok else "bad")


def self_check_report(check: SelfCheck) -> Report:
    """Of a list of commands."""
    failed = [step.title for step in check.steps if step.status not in _ENDINGS]
    skipped = [step.title for step in check.steps if step.status == 3]
    words = [
        f"{len(check.steps)} steps on {', '.join(check.backends)}, model {check.model}.",
        *([f"Failed: {', '.join(failed)}."] if failed else []),
        *([f"Not run, for lack of something: {', '.join(skipped)}."] if skipped else []),
        *([] if check.complete else ["It was cut short, or goes on."]),
        *(["Every step that was run is done."] if check.all_pass and not failed else []),
    ]
    header = ("step", "ended", "took", "command", "remark")
    steps = table("Every step", header, list(map(_step, check.steps)), numeric=False)
    passed = False if failed or not check.all_pass else None if skipped or not check.complete else True
    return Report("Self-check", check.generated_at_utc[:10], passed, tuple(words), (), (Section("Steps", steps),))


def _step(step: SelfCheckStep) -> tuple[Cell | str, ...]:
    ending = _ENDINGS.get(step.status, Cell(f"failed ({step.status})", "bad"))
    return step.title, ending, milliseconds(1000 * step.seconds), Cell(step.command, "code"), step.detail or NONE
