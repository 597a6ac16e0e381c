"""A row of each backend, side by side: correctness, deltas, the winner, and the recommendation as a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefixwise.bench.kinds.base import BackendName
from prefixwise.bench.kinds.comparison.model import (
    COMPARED,
    MISSING,
    SHAPE_MISMATCH,
    BestNativeView,
    Correctness,
    PortableView,
    Winner,
    WinningRow,
)
from prefixwise.bench.kinds.score_matrix import MatrixRow, Selection, select, select_winner
from prefixwise.bench.rules import Bounds, Differences, score_differences

_METRICS = ("throughput_items_sec", "p50_total_e2e_ms", "p95_total_e2e_ms", "mean_total_e2e_ms", "items_per_usd")


def correctness_of(jax: MatrixRow | None, pytorch: MatrixRow | None, options: Bounds) -> Correctness:
    """Compare JAX's scores with PyTorch's."""
    scores, reference = (None if row is None else row.reference_scores for row in (jax, pytorch))
    if scores is None or reference is None:
        lacking = " and ".join(name for name, has in (("jax", scores), ("pytorch", reference)) if has is None)
        return _correctness(MISSING, None, False, f"no scores of {lacking}")
    try:
        found = score_differences(scores, reference)
    except ValueError as error:
        return _correctness(SHAPE_MISMATCH, None, False, str(error))
    detail = (
        f"max abs diff {found.max_abs_diff:.3g} (at most {options.max_abs_diff:g}), "
        f"mean {found.mean_abs_diff:.3g} (at most {options.mean_abs_diff:g})"
    )
    return _correctness(COMPARED, found, found.within(options.max_abs_diff, options.mean_abs_diff), detail)


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


def winner_of(jax: Sequence[MatrixRow], pytorch: Sequence[MatrixRow], guardrail_ratio: float) -> Winner:
    """By the rule for rows, over the rows that count of both backends. JAX's wins a tie, which is marked."""
    found = select([*jax, *pytorch], guardrail_ratio)
    best = found.row
    if best is None:
        return _winner(found, guardrail_ratio, None)
    backend: BackendName = "jax" if any(row is best for row in jax) else "pytorch"
    other = select_winner(pytorch if backend == "jax" else jax, guardrail_ratio)
    return _winner(found, guardrail_ratio, backend).model_copy(
        update={
            "tie": _same(best, other, guardrail_ratio),
            "ratio": _ratio(best, other),
            "deltas": deltas_of(best, other) if backend == "jax" else deltas_of(other, best),
        }
    )


def best_of(backend: BackendName, rows: Sequence[MatrixRow], guardrail_ratio: float) -> Winner:
    """The best row of one backend, of the rows that count."""
    return _winner(select(rows, guardrail_ratio), guardrail_ratio, backend)


def _winner(found: Selection, guardrail_ratio: float, backend: BackendName | None) -> Winner:
    row = found.row
    return Winner(
        eligible_count=found.eligible_count,
        guardrail_ratio=guardrail_ratio,
        guardrail_p95_ms=found.guardrail_p95_ms,
        winner=None
        if row is None or backend is None
        else WinningRow(
            backend=backend,
            client_chunk_size=row.client_chunk_size,
            throughput_items_sec=row.throughput_items_sec,
            p95_total_e2e_ms=row.p95_total_e2e_ms,
        ),
    )


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


_OTHER: Mapping[BackendName, BackendName] = {"jax": "pytorch", "pytorch": "jax"}


def recommendations(portable: PortableView, native: BestNativeView) -> dict[str, str]:
    """One sentence for each view, and one for both."""
    failed = next((row.correctness for row in portable.rows if _is_wrong(row.correctness)), None)
    selected: dict[BackendName, Any] = {"jax": native.jax_selected, "pytorch": native.pytorch_selected}
    wrong = native.correctness if _is_wrong(native.correctness) else None
    return {
        "portable": _sentence(portable.winner, portable.contest(), failed),
        "best_native": _sentence(native.winner, selected, wrong),
        "overall": _overall(portable, native) + _warning(portable, native),
    }


def _is_wrong(correctness: Correctness) -> bool:
    return not correctness.passed and correctness.status != MISSING


def _sentence(winner: Winner, rows: Mapping[BackendName, Any], wrong: Correctness | None) -> str:
    backend = winner.backend
    if backend is None:
        return "Neither: no backend has a chunk size that worked in every run."
    if backend == "tie":
        return f"Either: both do {_throughput_phrase(rows['jax'])}."
    other = _OTHER[backend]
    if winner.ratio is None:
        why = f"it fails the correctness gate, {wrong.detail}" if wrong and other == "jax" else "no row of it counts"
        return f"{backend}: {_throughput_phrase(rows[backend])}; {other} cannot be recommended, {why}."
    # The rule has only two reasons to choose one that is not faster: a smaller chunk, and the guardrail.
    is_smaller = rows[backend]["client_chunk_size"] < rows[other]["client_chunk_size"]
    is_better = winner.ratio > 1 or (winner.ratio == 1 and is_smaller)
    but = "" if is_better else ", whose p95 is beyond the guardrail"
    return (
        f"{backend}: {_throughput_phrase(rows[backend])}, {winner.ratio:.2f}x the throughput of {other} "
        f"at {_throughput_phrase(rows[other])}{but}."
    )


def _throughput_phrase(row: Mapping[str, Any]) -> str:
    return (
        f"{row['throughput_items_sec']:,.1f} items/s in chunks of {row['client_chunk_size']} "
        f"(p95 {row['p95_total_e2e_ms']:,.1f} ms)"
    )


def _overall(portable: PortableView, native: BestNativeView) -> str:
    """The best-native view decides where the two differ: it is how a backend would really be run."""
    same_client, own_settings = portable.winner.backend, native.winner.backend
    if own_settings is None:
        return "Neither backend can be recommended." if same_client is None else f"{same_client}, by the portable view."
    if own_settings == same_client:
        return f"{own_settings}, in both views." if own_settings != "tie" else "Either: they are equal in both views."
    return f"{own_settings}, by the best-native view; the portable view says {same_client or 'neither'}."


def _warning(portable: PortableView, native: BestNativeView) -> str:
    wrong = [f"chunk size {row.client_chunk_size}" for row in portable.rows if _is_wrong(row.correctness)]
    wrong += ["best native"] if _is_wrong(native.correctness) else []
    return f" The correctness gate failed: {', '.join(wrong)}." if wrong else ""
