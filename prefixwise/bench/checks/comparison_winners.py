"""A comparison made again from its own rows: each backend's best, the winner, the deltas, by the rules of `compare`.

Comparisons of other tools quote fewer figures of a row: what is not there is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prefixwise.bench.artifacts import BestNativeView, MatrixRow, PortableView
from prefixwise.bench.checks.findings import Findings
from prefixwise.bench.comparison.rows import deltas_of, winner_of
from prefixwise.bench.rules import select_winner

BACKENDS = ("jax", "pytorch")
Quote = Mapping[str, Any]
# What the choice is made by.
_NEEDED = ("client_chunk_size", "success_rate", "p95_total_e2e_ms", "throughput_items_sec")


def check_portable(view: PortableView, found: Findings) -> None:
    """The best row of each backend, then the better of the two."""
    for index, row in enumerate(view.rows):
        _check_deltas(f"portable_view.rows[{index}].deltas", row.deltas, row.jax, row.pytorch, found)
    jax, pytorch = ([getattr(row, name) for row in view.rows if getattr(row, name) is not None] for name in BACKENDS)
    if not _are_whole([*jax, *pytorch]):
        return
    correct = {row.client_chunk_size for row in view.rows if row.correctness.passed}
    best_jax = select_winner(map(_row, jax), view.guardrail_ratio, lambda row: row.client_chunk_size in correct)
    best_pytorch = select_winner(map(_row, pytorch), view.guardrail_ratio)
    for name, best in (("jax", best_jax), ("pytorch", best_pytorch)):
        if name in view.backend_best:
            _check_best(f"portable_view.backend_best.{name}", best, view.backend_best[name], found)
    expected = winner_of(best_jax, best_pytorch, view.guardrail_ratio)
    _check_winner("portable_view.winner", expected, view.winner, found)


def check_native(view: BestNativeView, guardrail_ratio: float, found: Findings) -> None:
    """JAX's row counts only where its scores are PyTorch's."""
    jax, pytorch = view.jax_selected, view.pytorch_selected
    _check_deltas("best_native_view.deltas", view.deltas, jax, pytorch, found)
    if not _are_whole([row for row in (jax, pytorch) if row is not None]):
        return
    trusted = _row(jax) if jax is not None and view.correctness.passed else None
    expected = winner_of(trusted, None if pytorch is None else _row(pytorch), guardrail_ratio)
    _check_winner("best_native_view.winner", expected, view.winner, found)


def _are_whole(quotes: Iterable[Quote]) -> bool:
    return all(name in quote for quote in quotes for name in _NEEDED)


def _row(quote: Quote) -> MatrixRow:
    """With its figures alone; those that are not quoted are None."""
    return MatrixRow.model_construct(**{name: quote.get(name) for name in MatrixRow.model_fields})


def _check_best(where: str, best: MatrixRow | None, got: Quote | None, found: Findings) -> None:
    size = None if best is None else best.client_chunk_size
    own = None if got is None else got.get("client_chunk_size")
    found.same(f"{where}.client_chunk_size", size, own, "by the rows")
    if best is None or got is None or own != size:
        return
    for name in ("throughput_items_sec", "p95_total_e2e_ms"):
        if name in got:
            found.close(f"{where}.{name}", getattr(best, name), got[name], "of its row")


def _check_winner(where: str, expected: Quote, got: Quote, found: Findings) -> None:
    """A tie, or none at all, goes by other names elsewhere."""
    if "backend" in got and (expected["backend"] in BACKENDS or got["backend"] in BACKENDS):
        found.same(f"{where}.backend", expected["backend"], got["backend"], "by the rows")
        if got["backend"] != expected["backend"]:
            return  # the rest is the other's
    if "client_chunk_size" in got:
        found.same(f"{where}.client_chunk_size", expected["client_chunk_size"], got["client_chunk_size"], "by the rows")
    if "ratio" in got:
        found.close(f"{where}.ratio", expected["ratio"], got["ratio"], "by the rows")
    _check_figures(f"{where}.deltas", expected["deltas"], got.get("deltas"), found)


def _check_deltas(where: str, got: object, jax: Quote | None, pytorch: Quote | None, found: Findings) -> None:
    if jax is None or pytorch is None:
        expected = None
    else:
        both = jax.keys() & pytorch.keys()
        every = deltas_of(_row(jax), _row(pytorch)) or {}
        expected = {name: value for name, value in every.items() if name.removesuffix("_pct") in both}
    _check_figures(where, expected, got, found)


def _check_figures(where: str, expected: Mapping[str, float | None] | None, got: object, found: Findings) -> None:
    if got is None:
        return
    if expected is None or not isinstance(got, Mapping):
        found.fail(where, "figures where both backends have a row, and only there", got)
        return
    for name, value in expected.items():
        if name in got:
            found.close(f"{where}.{name}", value, got[name], "by the rows")
