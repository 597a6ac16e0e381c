"""A multi-item server against a serial one: the first half of `validate combine`."""

from __future__ import annotations

from prefixwise.bench.kinds.base import Artifact, Scores
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.named import Named, subject
from prefixwise.bench.render.document import Block, table
from prefixwise.bench.render.numbers import ratio, short_number
from prefixwise.bench.rules import item_differences, mean


class Differences(Artifact):
    """Two servers' scores of the same items. The mean is that of the items' largest differences.

    The lists are None in files of prefixwise 0.1, whose mean is that of all scores.
    """

    max_abs_diff: float
    mean_abs_diff: float
    num_compared: int | None = None


class Equivalence(Differences):
    """After query + item."""

    abs_diffs_multi_vs_serial: list[float] | None = None
    multi_scores: Scores | None = None
    serial_scores: Scores | None = None


class AlignedEquivalence(Differences):
    """After query + delimiter + item, the prompt of a multi-item server."""

    abs_diffs_multi_vs_serial_query_plus_delimiter: list[float] | None = None
    serial_query_plus_delimiter_scores: Scores | None = None


class IsolationSummary(Artifact):
    """Of the multi-item server."""

    same_length_mutation_max_abs_diff: float
    changed_length_mutation_max_abs_diff: float
    same_length_mutation_unchanged_diffs: list[float] | None = None
    changed_length_mutation_unchanged_diffs: list[float] | None = None
    same_length_mutation_mean_abs_diff: float | None = None
    changed_length_mutation_mean_abs_diff: float | None = None


class Speedup(Artifact):
    """So many items at a time, against one by one."""

    speedup_vs_serial_p50: float
    multi_p50_sec: float
    serial_p50_sec: float
    speedup_vs_serial_p95: float | None = None
    multi_p95_sec: float | None = None
    serial_p95_sec: float | None = None
    multi_items_per_sec_p50: float | None = None
    serial_items_per_sec_p50: float | None = None
    multi_latencies_sec: list[float] | None = None
    serial_latencies_sec: list[float] | None = None


class MultiVsSerial(Artifact):
    """`validate combine`, the first half."""

    model: str
    multi_url: str
    serial_url: str
    labels: list[int]
    equivalence: Equivalence
    equivalence_query_plus_delimiter: AlignedEquivalence | None = None  # None: the serial server was not asked
    isolation: IsolationSummary
    performance: dict[str, Speedup]
    generated_at_utc: str | None = None
    delimiter: int | None = None

    @property
    def aligned_max_abs_diff(self) -> float | None:
        aligned = self.equivalence_query_plus_delimiter
        return None if aligned is None else aligned.max_abs_diff


_GATED_COUNT = "32"


def check_multi_vs_serial(combined: MultiVsSerial, found: Findings) -> None:
    """Differences follow from scores, speed-ups are ratios of the medians; a mean is never above its maximum."""
    alone, aligned = combined.equivalence, combined.equivalence_query_plus_delimiter
    own = (alone.multi_scores, alone.serial_scores)
    _check_differences("equivalence", alone, "abs_diffs_multi_vs_serial", own, found)
    if aligned is None:
        found.warn("equivalence_query_plus_delimiter", "the field, which a gate is on", "nothing")
    else:
        scores = (alone.multi_scores, aligned.serial_query_plus_delimiter_scores)
        diffs = "abs_diffs_multi_vs_serial_query_plus_delimiter"
        _check_differences("equivalence_query_plus_delimiter", aligned, diffs, scores, found)
    found.warn_of_few_labels("labels", combined.labels)
    for count, metrics in combined.performance.items():
        _check_speedup(f"performance.{count}", metrics, found)
    if _GATED_COUNT not in combined.performance:
        found.warn("performance", f"{_GATED_COUNT} items, which a gate is on", f"{list(combined.performance)}")
    for name in (name for name in IsolationSummary.model_fields if name.endswith("_abs_diff")):
        value = getattr(combined.isolation, name)
        if value is not None and value < 0:
            found.fail(f"isolation.{name}", "0 or more, as it is a difference", value)
        elif name.endswith("_max_abs_diff") and value != 0.0:
            found.warn(f"isolation.{name}", "0.0", value)


def _check_differences(
    where: str, got: Differences, field: str, scores: tuple[Scores | None, Scores | None], found: Findings
) -> None:
    """Check the mean and the maximum, by the items' differences and their scores where the file has them."""
    if not 0 <= got.mean_abs_diff <= got.max_abs_diff * (1 + 1e-9):
        found.fail(f"{where}.mean_abs_diff", f"from 0 to max_abs_diff, {got.max_abs_diff:.6g}", got.mean_abs_diff)
    diffs: list[float] | None = getattr(got, field)
    multi, serial = scores
    if not diffs:
        return
    found.close(f"{where}.max_abs_diff", max(diffs), got.max_abs_diff, f"of {field}")
    found.close(f"{where}.mean_abs_diff", mean(diffs), got.mean_abs_diff, f"of {field}")
    if multi is None or serial is None:
        return
    try:
        expected = item_differences(multi, serial)
    except ValueError:
        found.fail(f"{where}, its scores", "two tables of one shape", "others")
        return
    found.same(f"{where}.{field} length", len(expected), len(diffs), "the items")
    for index, (again, diff) in enumerate(zip(expected, diffs, strict=False)):
        found.close(f"{where}.{field}[{index}]", again, diff, "by the scores")


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
