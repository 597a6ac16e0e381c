"""How sure a ratio is: paired by round, with Student's interval of the logarithms, which holds for few rounds, too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prefixwise.bench.artifacts import AbRun, SpeedRatio
from prefixwise.bench.rules import mean, percentile

CONFIDENCE = 0.95
_HALVINGS = 60


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one value above zero."""
    return math.exp(mean([math.log(value) for value in values]))


def round_medians(runs: Sequence[AbRun]) -> list[float]:
    """One time for every round, in order."""
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
    low, high = (None, None) if len(logs) < 2 else _interval(logs, middle)
    return SpeedRatio(ratio=math.exp(middle), low=low, high=high, confidence=CONFIDENCE, num_rounds=len(logs))


def _interval(logs: Sequence[float], middle: float) -> tuple[float, float]:
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
