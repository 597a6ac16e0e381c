"""The rules of the harness, each a pure function: percentiles, rows, selection, gates.

percentile        interpolates linearly between the two nearest values
throughput        items / mean total time
first-run penalty the first timed run over the mean of the others
eligible          success rate 1.0, and p95 and throughput exist (in a comparison its correctness gate passes, too)
guardrail         p95 within 1.25 x the best eligible p95
winner            highest throughput within the guardrail; on a tie the smaller chunk
confirm           chunk 1, the winner, and its two neighbours among the sizes that worked
correctness       max abs diff <= 0.02 and mean abs diff <= 0.01 against the reference
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prefixwise.bench.artifacts import MatrixRow, Scores

GUARDRAIL_RATIO = 1.25
MAX_ABS_DIFF = 0.02
MEAN_ABS_DIFF = 0.01
CONFIRM_RUNS = 7


def percentile(values: Sequence[float], percent: float) -> float:
    """Of at least one value; `percent` from 0 to 100."""
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
    """Of at least one value."""
    if not values:
        raise ValueError("a mean needs at least one value, got none")
    return math.fsum(values) / len(values)


def first_run_penalty(total_ms: Sequence[float]) -> float | None:
    """None where there is no other run, or the others took no time."""
    if len(total_ms) < 2:
        return None
    others = mean(total_ms[1:])
    return total_ms[0] / others if others > 0 else None


def is_eligible(row: MatrixRow) -> bool:
    """May it be recommended?"""
    return row.success_rate == 1.0 and row.p95_total_e2e_ms is not None and row.throughput_items_sec is not None


def select_winner(
    rows: Iterable[MatrixRow],
    guardrail_ratio: float = GUARDRAIL_RATIO,
    is_correct: Callable[[MatrixRow], bool] | None = None,
) -> MatrixRow | None:
    """The row to recommend, None where none is eligible. `is_correct`: the gate of a comparison."""
    eligible = [row for row in rows if is_eligible(row) and (is_correct is None or is_correct(row))]
    if not eligible:
        return None
    limit = guardrail_ratio * min(row.p95_total_e2e_ms or 0.0 for row in eligible)
    within = [row for row in eligible if (row.p95_total_e2e_ms or 0.0) <= limit]
    return min(within, key=lambda row: (-(row.throughput_items_sec or 0.0), row.client_chunk_size))


def confirm_sizes(rows: Sequence[MatrixRow], winner: MatrixRow | None) -> list[int]:
    """What to measure again, ascending; nothing where there is no winner."""
    if winner is None:
        return []
    worked = sorted({row.client_chunk_size for row in rows if row.success_rate == 1.0})
    place = worked.index(winner.client_chunk_size)
    neighbours = worked[max(0, place - 1) : place + 2]
    return sorted({*neighbours, *(size for size in worked if size == 1)})


@dataclass(frozen=True)
class Differences:
    """Between two tables of scores, value by value."""

    max_abs_diff: float
    mean_abs_diff: float
    num_compared: int

    def within(self, max_abs: float = MAX_ABS_DIFF, mean_abs: float = MEAN_ABS_DIFF) -> bool:
        return self.max_abs_diff <= max_abs and self.mean_abs_diff <= mean_abs


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
