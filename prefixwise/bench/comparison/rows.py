"""A row of each backend, side by side: do the scores agree, by how much do the figures differ, which is better?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefixwise.bench.artifacts import Correctness, MatrixRow
from prefixwise.bench.rules import (
    GUARDRAIL_RATIO,
    MAX_ABS_DIFF,
    MEAN_ABS_DIFF,
    Differences,
    score_differences,
    select_winner,
)

_FIGURES = ("throughput_items_sec", "p50_total_e2e_ms", "p95_total_e2e_ms", "mean_total_e2e_ms", "items_per_usd")


@dataclass(frozen=True)
class CompareOptions:
    """The gates."""

    max_abs_diff: float = MAX_ABS_DIFF
    mean_abs_diff: float = MEAN_ABS_DIFF
    guardrail_ratio: float = GUARDRAIL_RATIO


def correctness_of(jax: MatrixRow | None, pytorch: MatrixRow | None, options: CompareOptions) -> Correctness:
    """Are JAX's scores PyTorch's?"""
    scores, reference = (None if row is None else row.reference_scores for row in (jax, pytorch))
    if scores is None or reference is None:
        lacking = " and ".join(name for name, has in (("jax", scores), ("pytorch", reference)) if has is None)
        return _correctness("missing", None, False, f"no scores of {lacking}")
    try:
        found = score_differences(scores, reference)
    except ValueError as error:
        return _correctness("shape_mismatch", None, False, str(error))
    detail = (
        f"max abs diff {found.max_abs_diff:.3g} (at most {options.max_abs_diff:g}), "
        f"mean {found.mean_abs_diff:.3g} (at most {options.mean_abs_diff:g})"
    )
    return _correctness("compared", found, found.within(options.max_abs_diff, options.mean_abs_diff), detail)


def _correctness(status: str, found: Differences | None, passed: bool, detail: str) -> Correctness:
    return Correctness.model_validate(
        {
            "status": status,
            "max_abs_diff": None if found is None else found.max_abs_diff,
            "mean_abs_diff": None if found is None else found.mean_abs_diff,
            "num_compared": 0 if found is None else found.num_compared,
            "pass": passed,
            "detail": detail,
        }
    )


def deltas_of(jax: MatrixRow | None, pytorch: MatrixRow | None) -> dict[str, Any] | None:
    """By figure: the difference, and the same in percent of PyTorch's."""
    if jax is None or pytorch is None:
        return None
    deltas: dict[str, Any] = {}
    for figure in _FIGURES:
        ours, theirs = getattr(jax, figure), getattr(pytorch, figure)
        known = ours is not None and theirs is not None
        deltas[figure] = ours - theirs if known else None
        deltas[f"{figure}_pct"] = 100 * (ours - theirs) / theirs if known and theirs else None
    return deltas


def winner_of(jax: MatrixRow | None, pytorch: MatrixRow | None, guardrail_ratio: float) -> dict[str, Any]:
    """By the rule for rows; `backend` is None where neither can be chosen, "tie" where nothing tells them apart.

    `ratio`: the winner's throughput over the other's, None where there is no other.
    """
    best = select_winner([row for row in (jax, pytorch) if row is not None], guardrail_ratio)
    if best is None:
        return {"backend": None, "client_chunk_size": None, "ratio": None, "deltas": None}
    other = pytorch if best is jax else jax
    return {
        "backend": "tie" if _same(best, other, guardrail_ratio) else "jax" if best is jax else "pytorch",
        "client_chunk_size": best.client_chunk_size,
        "ratio": _ratio(best, other),
        "deltas": deltas_of(jax, pytorch),
    }


def _same(best: MatrixRow, other: MatrixRow | None, guardrail_ratio: float) -> bool:
    """Equally fast in chunks of one size, and either is within the guardrail of the other."""
    if other is None or best.p95_total_e2e_ms is None or other.p95_total_e2e_ms is None:
        return False
    if other.p95_total_e2e_ms > guardrail_ratio * best.p95_total_e2e_ms:
        return False
    mine = (best.throughput_items_sec, best.client_chunk_size)
    return mine == (other.throughput_items_sec, other.client_chunk_size)


def _ratio(best: MatrixRow, other: MatrixRow | None) -> float | None:
    if other is None or not other.throughput_items_sec or best.throughput_items_sec is None:
        return None
    return best.throughput_items_sec / other.throughput_items_sec
