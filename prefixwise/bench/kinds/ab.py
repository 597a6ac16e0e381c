"""Variants against each other on one machine: `bench ab`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.load import LoadGeometry
from prefixwise.bench.kinds.named import Named, backend_name
from prefixwise.bench.kinds.score_matrix import CorrectnessThresholds
from prefixwise.bench.render.document import Block, Cell, Paragraph, bullets, table
from prefixwise.bench.rules import mean, percentile

AB_VERSION: Literal["score_ab_v1"] = "score_ab_v1"


class ScoreDifferences(Artifact):
    """A variant's scores of the requests that the first variant scored, too."""

    max_abs_diff: float
    mean_abs_diff: float
    num_compared: int


class SpeedRatio(Artifact):
    """The first variant's time over this one's, paired by round: 2.0 is twice as fast. It is the ratio of their
    `time_ms`; the interval is Student's, of the logarithms, and None with one round."""

    ratio: float
    low: float | None
    high: float | None
    confidence: float
    num_rounds: int


class AbRun(Artifact):
    """One timed run."""

    round_index: int
    place: int  # in the order of its round
    seconds: float


class AbVariant(Artifact):
    """One of those compared. Metrics are None where it failed."""

    name: str
    server_flags: list[str]
    request_fields: dict[str, Any]
    server_config: dict[str, Any]
    status: Literal["ok", "failed"]
    failure: str | None
    time_ms: float | None = None  # the geometric mean of the rounds' medians; None in older files, too
    median_ms: float | None  # of all runs, as the p95 is
    p95_ms: float | None
    items_per_sec: float | None  # by `time_ms`; in older files by the median
    speed_vs_first: SpeedRatio | None
    scores_vs_first: ScoreDifferences | None
    scores_agree: bool
    runs: list[AbRun]


class AbResult(Artifact):
    """`bench ab`."""

    schema_version: Literal["score_ab_v1"]
    generated_at_utc: str
    model: str | None  # None: the embedded one
    compare: str
    geometry: LoadGeometry
    cached: bool
    rounds: int  # that were run to their end
    runs_per_round: int
    warmup_runs: int
    seed: int
    correctness_thresholds: CorrectnessThresholds
    variants: list[AbVariant] = Field(min_length=1)
    cut_short: bool = False  # by an interrupt: the rounds that were finished
    notes: list[str]


CONFIDENCE = 0.95


_HALVINGS = 60


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of at least one value above zero."""
    return math.exp(mean([math.log(value) for value in values]))


def round_medians(runs: Sequence[AbRun]) -> list[float]:
    """The median time of every round, in order."""
    by_round: dict[int, list[float]] = {}
    for run in runs:
        by_round.setdefault(run.round_index, []).append(run.seconds)
    return [percentile(by_round[index], 50) for index in sorted(by_round)]


def speed_ratio(first_seconds: Sequence[float], seconds: Sequence[float]) -> SpeedRatio | None:
    """One time of each variant per round, in the same order. None where there is no round.

    The ratio is the geometric mean over the rounds: a ratio and its inverse agree, it is the ratio of the variants'
    own geometric means, and what slows a whole round down cancels in the interval.
    """
    if not first_seconds:
        return None
    logs = [math.log(first) - math.log(own) for first, own in zip(first_seconds, seconds, strict=True)]
    middle = mean(logs)
    low, high = (None, None) if len(logs) < 2 else _student_interval(logs, middle)
    return SpeedRatio(ratio=math.exp(middle), low=low, high=high, confidence=CONFIDENCE, num_rounds=len(logs))


def _student_interval(logs: Sequence[float], middle: float) -> tuple[float, float]:
    freedom = len(logs) - 1
    deviation = math.sqrt(math.fsum((log - middle) ** 2 for log in logs) / freedom)
    reach = student_quantile(CONFIDENCE, freedom) * deviation / math.sqrt(len(logs))
    return math.exp(middle - reach), math.exp(middle + reach)


def student_quantile(confidence: float, freedom: int) -> float:
    """The t that Student's distribution stays within, on both sides, with this probability.

    `freedom` is one or more. Found by halving: the probability grows with the angle whose tangent is t / sqrt(freedom).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        angle = (low + high) / 2
        low, high = (angle, high) if _probability(angle, freedom) < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _probability(angle: float, freedom: int) -> float:
    """Of |t| <= sqrt(freedom) tan(angle): the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = 0.0 if freedom == 1 else term
    for power in range(2 + is_odd, freedom - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def check_ab(result: AbResult, found: Findings) -> None:
    """Check every variant."""
    names = [variant.name for variant in result.variants]
    for index, variant in enumerate(result.variants):
        where = f"variants[{index}]"
        if names.index(variant.name) != index:
            found.fail(f"{where}.name", "a name that no other variant has", variant.name)
        _check_variant(where, variant, result.geometry.num_items, found)
        _check_speed(where, variant, result.variants[0], found)
        _check_scores(where, variant, result.correctness_thresholds, found)
    if result.rounds == 1:
        found.warn("rounds", "several, for an interval", 1)
    if result.cut_short:
        found.warn("cut_short", "false", "true")


def _check_variant(where: str, variant: AbVariant, num_items: int, found: Findings) -> None:
    found.same(f"{where}.status", "failed" if variant.failure is not None else "ok", variant.status, "by failure")
    if variant.status == "failed":
        found.warn(f"{where}.status", "ok", f"failed: {variant.failure}")
        return
    if not variant.runs:
        found.fail(f"{where}.runs", "at least one run, as it is ok", "none")
        return
    seconds = [run.seconds for run in variant.runs]
    time, name = percentile(seconds, 50), "median"
    found.close(f"{where}.median_ms", time * 1000, variant.median_ms, "by its runs")
    found.close(f"{where}.p95_ms", percentile(seconds, 95) * 1000, variant.p95_ms, "by its runs")
    if variant.time_ms is not None and min(seconds) > 0:
        time, name = geometric_mean(round_medians(variant.runs)), "time"
        found.close(f"{where}.time_ms", time * 1000, variant.time_ms, "by its rounds")
    if time > 0:
        found.close(f"{where}.items_per_sec", num_items / time, variant.items_per_sec, f"items / {name}")


def _check_speed(where: str, variant: AbVariant, first: AbVariant, found: Findings) -> None:
    if variant.speed_vs_first is not None and variant.time_ms and first.time_ms:
        ratio = first.time_ms / variant.time_ms
        found.close(f"{where}.speed_vs_first.ratio", ratio, variant.speed_vs_first.ratio, "of the times")


def _check_scores(where: str, variant: AbVariant, bounds: CorrectnessThresholds, found: Findings) -> None:
    own = variant.scores_vs_first
    if own is None:
        found.same(f"{where}.scores_agree", False, variant.scores_agree, "nothing was compared")
        return
    agree = own.max_abs_diff <= bounds.max_abs_diff and own.mean_abs_diff <= bounds.mean_abs_diff
    why = f"by its differences {own.max_abs_diff:.6g} and {own.mean_abs_diff:.6g}"
    found.same(f"{where}.scores_agree", agree, variant.scores_agree, why)
    if not variant.scores_agree:
        found.warn(f"{where}.scores_agree", "true", "false")


HEADERS = ("variant", "time ms", "p95 ms", "items/s", "speed", "95 % interval", "max diff", "mean diff", "scores")


_FEW_ROUNDS = 5


def cells_of(variant: AbVariant) -> tuple[str, ...]:
    """The cells of one variant, in the order of HEADERS."""
    speed, scores = variant.speed_vs_first, variant.scores_vs_first
    return (
        variant.name,
        _number(variant.median_ms if variant.time_ms is None else variant.time_ms),
        _number(variant.p95_ms),
        _number(variant.items_per_sec),
        "-" if speed is None else f"{speed.ratio:.3f}x",
        _interval(speed),
        "-" if scores is None else f"{scores.max_abs_diff:.2e}",
        "-" if scores is None else f"{scores.mean_abs_diff:.2e}",
        _verdict(variant),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _interval(speed: SpeedRatio | None) -> str:
    return "-" if speed is None or speed.low is None or speed.high is None else f"{speed.low:.3f} to {speed.high:.3f}"


def _verdict(variant: AbVariant) -> str:
    if variant.status == "failed":
        return "failed"
    return "agree" if variant.scores_agree else "DIFFER"


def notes_of(rounds: int, planned: int) -> list[str]:
    """Notes for a reader of the metrics."""
    notes = [f"cut short: {rounds} of {planned} rounds were finished"] if rounds < planned else []
    if 1 < rounds < _FEW_ROUNDS:
        notes.append(f"{rounds} rounds make a wide interval: --rounds 10 or more narrow it")
    return notes


def problems_of(result: AbResult) -> list[str]:
    """A line for every variant that failed, or whose scores are not the first one's."""
    limits = result.correctness_thresholds
    lines = []
    for variant in result.variants:
        if variant.failure is not None:
            lines.append(f"{variant.name} failed: {variant.failure}")
        elif not variant.scores_agree and variant.scores_vs_first is not None:
            got = variant.scores_vs_first
            lines.append(
                f"the scores of {variant.name} are not those of {result.variants[0].name}: expected max <= "
                f"{limits.max_abs_diff:g} and mean <= {limits.mean_abs_diff:g}, "
                f"got {got.max_abs_diff:g} and {got.mean_abs_diff:g}"
            )
    return lines


def variant_titles(results: Sequence[Named[AbResult]]) -> list[tuple[str, Named[AbResult]]]:
    """A title per result; with the backend or the file where two have the same variants."""
    plain = [" vs ".join(variant.name for variant in each.content.variants) for each in results]
    names = {each.name for each in results}
    return [
        (f"{title} ({each.name})" if plain.count(title) > 1 and len(names) > 1 else title, each)
        for title, each in zip(plain, results, strict=True)
    ]


def variant_blocks(result: AbResult) -> tuple[Block, ...]:
    """How it was measured, then the variants as a table."""
    shape, first = result.geometry, result.variants[0]
    devices = first.server_config.get("devices", {})
    device = ", ".join(str(devices[name]) for name in ("device", "kind", "dtype") if devices.get(name) is not None)
    measured = (
        f"{result.rounds} rounds of {result.runs_per_round} runs in turns; {shape.query_tokens:,} query tokens, "
        f"{shape.num_items:,} items of {shape.item_tokens:,} tokens, "
        f"{'one query with a cached prefix' if result.cached else 'another query in every run'}; "
        f"model {result.model or 'embedded'}{f' on {device}' if device else ''}. A time is the geometric mean of the "
        f"rounds' medians; the p95 is of all runs. Speed is the time of {first.name} over the variant's: more than 1 "
        f"is faster than {first.name}; its interval is Student's, paired by round."
    )
    return (
        Paragraph(measured),
        *variants_table(result),
        *bullets([*problems_of(result), *result.notes]),
    )


def backend_of_variants(result: AbResult) -> str | None:
    """The backend of all variants; None where they have different ones."""
    found = {backend_name(variant.server_config) for variant in result.variants}
    return found.pop() if len(found) == 1 else None


def variants_table(result: AbResult) -> tuple[Block, ...]:
    """A row for each variant."""
    rows: list[tuple[Cell | str, ...]] = []
    for variant in result.variants:
        *cells, scores = cells_of(variant)
        good = variant.status == "ok" and variant.scores_agree
        rows.append((*cells, Cell(scores, "good" if good else "bad")))
    return table(f"Compared by {result.compare}", HEADERS, rows)
