"""How sure a ratio is: paired by round, and the rounds drawn again and again (a percentile bootstrap)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from itemwise.harness.artifacts import SpeedRatio

CONFIDENCE = 0.95
_RESAMPLES = 10_000
_SEED = 20260211  # fixed: the same times give the same interval


def speed_ratio(first_seconds: Sequence[float], seconds: Sequence[float]) -> SpeedRatio | None:
    """One time of each variant per round, in the same order. None where there is no round.

    The ratio is the geometric mean over the rounds, so that a ratio and its inverse agree, and what slows a whole
    round down cancels.
    """
    if not first_seconds:
        return None
    logs = np.log(np.asarray(first_seconds, np.float64)) - np.log(np.asarray(seconds, np.float64))
    low, high = (None, None) if len(logs) < 2 else _interval(logs)
    return SpeedRatio(ratio=float(np.exp(logs.mean())), low=low, high=high, confidence=CONFIDENCE, num_rounds=len(logs))


def _interval(logs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    drawn = np.random.default_rng(_SEED).integers(len(logs), size=(_RESAMPLES, len(logs)))
    means = logs[drawn].mean(axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.exp(np.percentile(means, [tail, 100 - tail]))
    return float(low), float(high)
