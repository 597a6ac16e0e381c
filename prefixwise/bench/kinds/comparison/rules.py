"""A row of each backend, side by side: correctness, deltas, the winner, and the recommendation as a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixwise.bench.kinds.comparison.model import BestNativeView, Correctness, PortableView
from prefixwise.bench.kinds.score_matrix import MatrixRow, select_winner
from prefixwise.bench.rules import GUARDRAIL_RATIO, MAX_ABS_DIFF, MEAN_ABS_DIFF, Differences, score_differences

_METRICS = ("throughput_items_sec", "p50_total_e2e_ms", "p95_total_e2e_ms", "mean_total_e2e_ms", "items_per_usd")


@dataclass(frozen=True)
class CompareOptions:
    """The gates."""

    max_abs_diff: float = MAX_ABS_DIFF
    mean_abs_diff: float = MEAN_ABS_DIFF
    guardrail_ratio: float = GUARDRAIL_RATIO


def correctness_of(jax: MatrixRow | None, pytorch: MatrixRow | None, options: CompareOptions) -> Correctness:
    """Compare JAX's scores with PyTorch's."""
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
    """The difference of each metric, and the same in percent of PyTorch's."""
    if jax is None or pytorch is None:
        return None
    deltas: dict[str, Any] = {}
    for metric in _METRICS:
        ours, theirs = getattr(jax, metric), getattr(pytorch, metric)
        known = ours is not None and theirs is not None
        deltas[metric] = ours - theirs if known else None
        deltas[f"{metric}_pct"] = 100 * (ours - theirs) / theirs if known and theirs else None
    return deltas


def winner_of(jax: MatrixRow | None, pytorch: MatrixRow | None, guardrail_ratio: float) -> dict[str, Any]:
    """By the rule for rows; `backend` is None where neither can be chosen, "tie" where they are equal.

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


_OTHER = {"jax": "pytorch", "pytorch": "jax"}


def recommendations(portable: PortableView, native: BestNativeView) -> dict[str, str]:
    """One sentence for each view, and one for both."""
    failed = next((row.correctness for row in portable.rows if _is_wrong(row.correctness)), None)
    selected = {"jax": native.jax_selected, "pytorch": native.pytorch_selected}
    wrong = native.correctness if _is_wrong(native.correctness) else None
    return {
        "portable": _sentence(portable.winner, portable.backend_best, failed),
        "best_native": _sentence(native.winner, selected, wrong),
        "overall": _overall(portable, native) + _warning(portable, native),
    }


def _is_wrong(correctness: Correctness) -> bool:
    return not correctness.passed and correctness.status != "missing"


def _sentence(winner: Mapping[str, Any], rows: Mapping[str, Any], wrong: Correctness | None) -> str:
    backend = winner["backend"]
    if backend is None:
        return "Neither: no backend has a chunk size that worked in every run."
    if backend == "tie":
        return f"Either: both do {_throughput_phrase(rows['jax'])}."
    other = _OTHER[backend]
    if winner["ratio"] is None:
        why = f"it fails the correctness gate, {wrong.detail}" if wrong and other == "jax" else "no row of it counts"
        return f"{backend}: {_throughput_phrase(rows[backend])}; {other} cannot be recommended, {why}."
    # The rule has only two reasons to choose one that is not faster: a smaller chunk, and the guardrail.
    is_smaller = rows[backend]["client_chunk_size"] < rows[other]["client_chunk_size"]
    is_better = winner["ratio"] > 1 or (winner["ratio"] == 1 and is_smaller)
    but = "" if is_better else ", whose p95 is beyond the guardrail"
    return (
        f"{backend}: {_throughput_phrase(rows[backend])}, {winner['ratio']:.2f}x the throughput of {other} "
        f"at {_throughput_phrase(rows[other])}{but}."
    )


def _throughput_phrase(row: Mapping[str, Any]) -> str:
    return (
        f"{row['throughput_items_sec']:,.1f} items/s in chunks of {row['client_chunk_size']} "
        f"(p95 {row['p95_total_e2e_ms']:,.1f} ms)"
    )


def _overall(portable: PortableView, native: BestNativeView) -> str:
    """The best-native view decides where the two differ: it is how a backend would really be run."""
    same_client, own_settings = portable.winner["backend"], native.winner["backend"]
    if own_settings is None:
        return "Neither backend can be recommended." if same_client is None else f"{same_client}, by the portable view."
    if own_settings == same_client:
        return f"{own_settings}, in both views." if own_settings != "tie" else "Either: they are equal in both views."
    return f"{own_settings}, by the best-native view; the portable view says {same_client or 'neither'}."


def _warning(portable: PortableView, native: BestNativeView) -> str:
    wrong = [f"chunk size {row.client_chunk_size}" for row in portable.rows if _is_wrong(row.correctness)]
    wrong += ["best native"] if _is_wrong(native.correctness) else []
    return f" The correctness gate failed: {', '.join(wrong)}." if wrong else ""
