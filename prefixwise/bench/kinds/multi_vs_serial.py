"""A multi-item server against a serial one: the first half of `validate combine`."""

from __future__ import annotations

from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.named import Named, subject
from prefixwise.bench.render.document import Block, table
from prefixwise.bench.render.numbers import ratio, short_number


class Equivalence(Artifact):
    """Two servers' scores of the same items."""

    max_abs_diff: float
    mean_abs_diff: float
    num_compared: int | None = None


class IsolationSummary(Artifact):
    """Of the multi-item server."""

    same_length_mutation_max_abs_diff: float
    changed_length_mutation_max_abs_diff: float
    same_length_mutation_mean_abs_diff: float | None = None
    changed_length_mutation_mean_abs_diff: float | None = None


class Speedup(Artifact):
    """So many items at a time, against one by one."""

    speedup_vs_serial_p50: float
    multi_p50_sec: float
    serial_p50_sec: float
    speedup_vs_serial_p95: float | None = None
    multi_items_per_sec_p50: float | None = None
    serial_items_per_sec_p50: float | None = None


class MultiVsSerial(Artifact):
    """`validate combine`, the first half."""

    model: str
    multi_url: str
    serial_url: str
    labels: list[int]
    equivalence: Equivalence
    equivalence_query_plus_delimiter: Equivalence
    isolation: IsolationSummary
    performance: dict[str, Speedup]
    generated_at_utc: str | None = None
    delimiter: int | None = None


_GATED_COUNT = "32"


def check_multi_vs_serial(combined: MultiVsSerial, found: Findings) -> None:
    """Speed-ups are ratios of the medians; a mean is never above its maximum."""
    pairs = {
        "equivalence": combined.equivalence,
        "equivalence_query_plus_delimiter": combined.equivalence_query_plus_delimiter,
    }
    for name, each in pairs.items():
        if not 0 <= each.mean_abs_diff <= each.max_abs_diff * (1 + 1e-9):
            found.fail(f"{name}.mean_abs_diff", f"from 0 to max_abs_diff, {each.max_abs_diff:.6g}", each.mean_abs_diff)
    found.warn_of_few_labels("labels", combined.labels)
    for count, metrics in combined.performance.items():
        _check_speedup(f"performance.{count}", metrics, found)
    if _GATED_COUNT not in combined.performance:
        found.warn("performance", f"{_GATED_COUNT} items, which a gate is on", f"{list(combined.performance)}")
    for name in IsolationSummary.model_fields:
        value = getattr(combined.isolation, name)
        if value is not None and value < 0:
            found.fail(f"isolation.{name}", "0 or more, as it is a difference", value)
        elif name.endswith("_max_abs_diff") and value != 0.0:
            found.warn(f"isolation.{name}", "0.0", value)


def _check_speedup(where: str, metrics: Speedup, found: Findings) -> None:
    for name in ("multi_p50_sec", "serial_p50_sec"):
        if getattr(metrics, name) <= 0:
            found.fail(f"{where}.{name}", "more than 0", getattr(metrics, name))
            return
    ratio = metrics.serial_p50_sec / metrics.multi_p50_sec
    found.close(f"{where}.speedup_vs_serial_p50", ratio, metrics.speedup_vs_serial_p50, "serial over multi")


def speedup_table(found: Named[MultiVsSerial], *, several: bool) -> tuple[Block, ...]:
    """By the number of items; `several`: the caption has the name."""
    rows = [
        [
            count,
            short_number(each.multi_p50_sec * 1000),
            short_number(each.serial_p50_sec * 1000),
            ratio(each.speedup_vs_serial_p50),
        ]
        for count, each in found.content.performance.items()
    ]
    header = ("items", "multi-item p50 (ms)", "serial p50 (ms)", "speed-up")
    return table(f"Multi-item against one by one, {subject(found.content.model, found.name, several)}", header, rows)
