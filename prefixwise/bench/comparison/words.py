"""What a comparison recommends, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixwise.bench.artifacts import BestNativeView, Correctness, PortableView

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
        return f"Either: both do {_figures(rows['jax'])}."
    other = _OTHER[backend]
    if winner["ratio"] is None:
        why = f"it fails the correctness gate, {wrong.detail}" if wrong and other == "jax" else "no row of it counts"
        return f"{backend}: {_figures(rows[backend])}; {other} cannot be recommended, {why}."
    # The rule has only two reasons to choose one that is not faster: a smaller chunk, and the guardrail.
    is_smaller = rows[backend]["client_chunk_size"] < rows[other]["client_chunk_size"]
    is_better = winner["ratio"] > 1 or (winner["ratio"] == 1 and is_smaller)
    but = "" if is_better else ", whose p95 is beyond the guardrail"
    return (
        f"{backend}: {_figures(rows[backend])}, {winner['ratio']:.2f}x the throughput of {other} "
        f"at {_figures(rows[other])}{but}."
    )


def _figures(row: Mapping[str, Any]) -> str:
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
