"""Statistics of the measurements, each a pure function.

percentile        interpolates linearly between the two nearest values
first-run penalty the first timed run over the mean of the rest
correctness       max abs diff <= 0.02 and mean abs diff <= 0.01 against the reference
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prefixwise.bench.kinds.base import Scores

GUARDRAIL_RATIO = 1.25


MAX_ABS_DIFF = 0.02


MEAN_ABS_DIFF = 0.01


@dataclass(frozen=True)
class Bounds:
    """How far scores may be from the reference, and how far a winner's p95 may be above the best one."""

    max_abs_diff: float = MAX_ABS_DIFF
    mean_abs_diff: float = MEAN_ABS_DIFF
    guardrail_ratio: float = GUARDRAIL_RATIO


DEFAULT_BOUNDS = Bounds()


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of at least one value; `percent` from 0 to 100."""
    if not values:
        raise ValueError("a percentile needs at least one value, got none")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be from 0 to 100, got {percent}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    if not values:
        raise ValueError("a mean needs at least one value, got none")
    return math.fsum(values) / len(values)


def first_run_penalty(total_ms: Sequence[float]) -> float | None:
    """The first run over the mean of the rest; None where there is no other run."""
    if len(total_ms) < 2:
        return None
    others = mean(total_ms[1:])
    return total_ms[0] / others if others > 0 else None


@dataclass(frozen=True)
class Differences:
    """Between two tables of scores, value by value."""

    max_abs_diff: float
    mean_abs_diff: float
    num_compared: int

    def within(self, max_abs: float = MAX_ABS_DIFF, mean_abs: float = MEAN_ABS_DIFF) -> bool:
        return self.max_abs_diff <= max_abs and self.mean_abs_diff <= mean_abs


def item_differences(scores: Scores, reference: Scores) -> list[float]:
    """For each item the largest difference of its labels' scores. Raises ValueError where the shapes differ."""
    pairs = zip(scores, reference, strict=True)
    return [max(abs(a - b) for a, b in zip(row, other, strict=True)) for row, other in pairs]


def score_differences(scores: Scores, reference: Scores) -> Differences:
    """Raises ValueError where they are not of one shape."""
    if [len(row) for row in scores] != [len(row) for row in reference]:
        shapes = " and ".join(
            f"{len(table)} rows of {sorted({len(row) for row in table})}" for table in (scores, reference)
        )
        raise ValueError(f"scores must be of one shape to be compared, got {shapes}")
    diffs = [abs(a - b) for row, other in zip(scores, reference, strict=True) for a, b in zip(row, other, strict=True)]
    if not diffs:
        raise ValueError("there is nothing to compare")
    return Differences(max(diffs), mean(diffs), len(diffs))
