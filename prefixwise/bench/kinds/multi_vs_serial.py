"""A multi-item server against a serial one: the first half of `validate combine`."""

from __future__ import annotations

from prefixwise.bench.kinds.base import Artifact, Scores
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.named import Named, subject
from prefixwise.bench.render.document import Block, table
from prefixwise.bench.render.numbers import ratio, short_number
from prefixwise.bench.rules import item_differences, mean, percentile


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

    def recomputed(self) -> MultiVsSerial:
        """With the metrics that gates judge computed again, from scores and times where the file has them.

        Only for a file that `check_multi_vs_serial` finds no error in.
        """
        aligned = self.equivalence_query_plus_delimiter
        if aligned is not None:
            by_scores = _item_diffs(self.equivalence.multi_scores, aligned.serial_query_plus_delimiter_scores)
            diffs = by_scores or aligned.abs_diffs_multi_vs_serial_query_plus_delimiter
            aligned = aligned.model_copy(update={"max_abs_diff": max(diffs)} if diffs else {})
        largest = {
            f"{name}_mutation_max_abs_diff": max(moved)
            for name in _MUTATIONS
            if (moved := getattr(self.isolation, f"{name}_mutation_unchanged_diffs"))
        }
        return self.model_copy(
            update={
                "equivalence_query_plus_delimiter": aligned,
                "isolation": self.isolation.model_copy(update=largest),
                "performance": {count: _recomputed_speedup(each) for count, each in self.performance.items()},
            }
        )


_GATED_COUNT = "32"
_MUTATIONS = ("same_length", "changed_length")
_SIDES = ("multi", "serial")


def _item_diffs(scores: Scores | None, reference: Scores | None) -> list[float]:
    return [] if scores is None or reference is None else item_differences(scores, reference)


def _recomputed_speedup(metrics: Speedup) -> Speedup:
    multi, serial = (
        percentile(latencies, 50)
        if (latencies := getattr(metrics, f"{side}_latencies_sec"))
        else getattr(metrics, f"{side}_p50_sec")
        for side in _SIDES
    )
    return metrics.model_copy(update={"speedup_vs_serial_p50": serial / multi})


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
        _check_speedup(count, metrics, found)
    if _GATED_COUNT not in combined.performance:
        found.warn("performance", f"{_GATED_COUNT} items, which a gate is on", f"{list(combined.performance)}")
    for name in (name for name in IsolationSummary.model_fields if name.endswith("_abs_diff")):
        value = getattr(combined.isolation, name)
        if value is not None and value < 0:
            found.fail(f"isolation.{name}", "0 or more, as it is a difference", value)
        elif name.endswith("_max_abs_diff") and value != 0.0:
            found.warn(f"isolation.{name}", "0.0", value)
    for name in _MUTATIONS:
        _check_isolation(combined.isolation, name, found)


def _check_isolation(isolation: IsolationSummary, mutation: str, found: Findings) -> None:
    """The maximum and the mean, by the differences of the unchanged items where the file has them."""
    names = (f"{mutation}_mutation_unchanged_diffs", f"{mutation}_mutation_max_abs_diff")
    diffs, largest = (getattr(isolation, name) for name in names)
    average = getattr(isolation, f"{mutation}_mutation_mean_abs_diff")
    if average is not None and average > largest * (1 + 1e-9):
        found.fail(f"isolation.{mutation}_mutation_mean_abs_diff", f"at most the maximum, {largest:.6g}", average)
    if diffs is None:
        return
    if not diffs or min(diffs) < 0:
        found.fail(f"isolation.{names[0]}", "a difference of 0 or more for each unchanged item", diffs[:5])
        return
    found.close(f"isolation.{names[1]}", max(diffs), largest, f"of {names[0]}")
    if average is not None:
        found.close(f"isolation.{mutation}_mutation_mean_abs_diff", mean(diffs), average, f"of {names[0]}")


def _check_differences(
    where: str, got: Differences, field: str, scores: tuple[Scores | None, Scores | None], found: Findings
) -> None:
    """Check the mean and the maximum, by the items' differences and their scores where the file has them."""
    if not 0 <= got.mean_abs_diff <= got.max_abs_diff * (1 + 1e-9):
        found.fail(f"{where}.mean_abs_diff", f"from 0 to max_abs_diff, {got.max_abs_diff:.6g}", got.mean_abs_diff)
    diffs: list[float] | None = getattr(got, field)
    try:
        expected = _item_diffs(*scores)
    except ValueError:
        found.fail(f"{where}, its scores", "two tables of one shape", "others")
        return
    if not expected and all(table is not None for table in scores):
        found.fail(f"{where}, its scores", "those of one item at least", "none")
        return
    if expected and got.num_compared is not None:
        found.same(f"{where}.num_compared", sum(map(len, scores[0] or ())), got.num_compared, "scores")
    if diffs is None:
        if expected:
            found.close(f"{where}.max_abs_diff", max(expected), got.max_abs_diff, "by the scores")
        return
    if not diffs:
        found.fail(f"{where}.{field}", "the differences of one item at least", "none")
        return
    found.close(f"{where}.max_abs_diff", max(diffs), got.max_abs_diff, f"of {field}")
    found.close(f"{where}.mean_abs_diff", mean(diffs), got.mean_abs_diff, f"of {field}")
    if not expected:
        return
    found.same(f"{where}.{field} length", len(expected), len(diffs), "the items")
    for index, (again, diff) in enumerate(zip(expected, diffs, strict=False)):
        found.close(f"{where}.{field}[{index}]", again, diff, "by the scores")


def _check_speedup(count: str, metrics: Speedup, found: Findings) -> None:
    """Percentiles follow from the times, where the file has them; rates and ratios from the percentiles."""
    where = f"performance.{count}"
    if not count.isdecimal() or int(count) < 1:
        found.fail(where, "a number of items", count)
        return
    can_compare = [_check_times(where, side, metrics, found) for side in _SIDES]
    if not all(can_compare):
        return
    for side in _SIDES:
        per_second = getattr(metrics, f"{side}_items_per_sec_p50")
        if per_second is not None:
            rate = int(count) / getattr(metrics, f"{side}_p50_sec")
            found.close(f"{where}.{side}_items_per_sec_p50", rate, per_second, f"{count} / p50")
    ratio = metrics.serial_p50_sec / metrics.multi_p50_sec
    found.close(f"{where}.speedup_vs_serial_p50", ratio, metrics.speedup_vs_serial_p50, "serial over multi")
    if metrics.speedup_vs_serial_p95 is not None and metrics.serial_p95_sec and metrics.multi_p95_sec:
        ratio = metrics.serial_p95_sec / metrics.multi_p95_sec
        found.close(f"{where}.speedup_vs_serial_p95", ratio, metrics.speedup_vs_serial_p95, "serial over multi")


def _check_times(where: str, side: str, metrics: Speedup, found: Findings) -> bool:
    """The times of the multi-item or of the serial server. Returns False where a ratio of them has no meaning."""
    latencies: list[float] | None = getattr(metrics, f"{side}_latencies_sec")
    p50: float = getattr(metrics, f"{side}_p50_sec")
    p95: float | None = getattr(metrics, f"{side}_p95_sec")
    if p50 <= 0:
        found.fail(f"{where}.{side}_p50_sec", "more than 0", p50)
        return False
    if p95 is not None and p95 < p50 * (1 - 1e-9):
        found.fail(f"{where}.{side}_p95_sec", f"at least p50, {p50:.6g}", p95)
    if latencies is None:
        return True
    if not latencies or min(latencies) <= 0:
        found.fail(f"{where}.{side}_latencies_sec", "times of more than 0 s", latencies[:5])
        return False
    for percent, seconds in ((50, p50), (95, p95)):
        if seconds is not None:
            name = f"{where}.{side}_p{percent}_sec"
            found.close(name, percentile(latencies, percent), seconds, f"of {side}_latencies_sec")
    return True


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
