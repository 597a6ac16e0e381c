"""A comparison against the matrices that it was made from, where they are still there: they are compared again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefixwise.bench.artifacts import Comparison, Correctness
from prefixwise.bench.checks.findings import Findings
from prefixwise.bench.checks.reading import find_files
from prefixwise.bench.comparison.compare import compare
from prefixwise.bench.comparison.inputs import read_inputs
from prefixwise.bench.comparison.rows import CompareOptions
from prefixwise.bench.files import sha256_of
from prefixwise.contract.errors import ArtifactError

_PORTABLE = ("jax_portable", "pytorch_portable")
_NATIVE = ("jax_best_native", "pytorch_best_native")
_FIGURES = ("success_rate", "throughput_items_sec", "p50_total_e2e_ms", "p95_total_e2e_ms", "mean_total_e2e_ms")
Quote = Mapping[str, Any]


def check_inputs(comparison: Comparison, bounds: Mapping[str, float], found: Findings) -> None:
    """`bounds`: of the correctness gate; without them nothing is compared again."""
    if not comparison.inputs:
        found.warn("inputs", "the matrices that were compared", "nothing")
    files = {name: _find(f"inputs.{name}", entry, found) for name, entry in comparison.inputs.items()}
    jax, pytorch = (files.get(name) for name in _PORTABLE)
    if jax is None or pytorch is None or not bounds:
        return
    native = [files.get(name) for name in _NATIVE]
    options = CompareOptions(**bounds, guardrail_ratio=comparison.portable_view.guardrail_ratio)
    try:
        expected = compare(read_inputs(jax, pytorch, *native), options)
    except ArtifactError as error:
        found.fail("inputs", "matrices that can be compared", error)
        return
    _check_rows(expected, comparison, found)
    if all(native):
        _check_native(expected, comparison, found)


def _find(where: str, entry: object, found: Findings) -> Path | None:
    """The file with that checksum; entries without one are other tools', and nothing is said of them."""
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("path", "sha256")):
        return None
    places = find_files(entry["path"], found.path)
    sums = {sha256_of(place): place for place in places}
    if not places:
        found.warn(f"{where}.path", "the matrix, to compare it again", f"no file {entry['path']}")
    elif entry["sha256"] not in sums:
        found.fail(
            f"{where}.sha256", " or ".join(f"{each}, of {place}" for each, place in sums.items()), entry["sha256"]
        )
    return sums.get(entry["sha256"])


def _check_rows(expected: Comparison, got: Comparison, found: Findings) -> None:
    sizes, own = ([row.client_chunk_size for row in each.portable_view.rows] for each in (expected, got))
    if sorted(own) != sizes:
        found.fail("portable_view.rows", f"the chunk sizes of the inputs, {sizes}", own)
        return
    rows = {row.client_chunk_size: row for row in expected.portable_view.rows}
    for index, row in enumerate(got.portable_view.rows):
        where, again = f"portable_view.rows[{index}]", rows[row.client_chunk_size]
        _check_quote(f"{where}.jax", again.jax, row.jax, found)
        _check_quote(f"{where}.pytorch", again.pytorch, row.pytorch, found)
        _check_gate(f"{where}.correctness", again.correctness, row.correctness, found)


def _check_native(expected: Comparison, got: Comparison, found: Findings) -> None:
    again, view = expected.best_native_view, got.best_native_view
    _check_quote("best_native_view.jax_selected", again.jax_selected, view.jax_selected, found)
    _check_quote("best_native_view.pytorch_selected", again.pytorch_selected, view.pytorch_selected, found)
    _check_gate("best_native_view.correctness", again.correctness, view.correctness, found)
    for name in ("rows_compared", "rows_passed", "pass"):
        if name in got.correctness:
            found.same(f"correctness.{name}", expected.correctness[name], got.correctness[name], "by the inputs")


def _check_quote(where: str, expected: Quote | None, got: Quote | None, found: Findings) -> None:
    if expected is None or got is None:
        if expected is not got:
            found.fail(where, f"{'no' if expected is None else 'a'} row, as in the inputs", got)
        return
    for name in ("client_chunk_size", *_FIGURES):
        if name in got:
            found.close(f"{where}.{name}", expected.get(name), got[name], "in the inputs")


def _check_gate(where: str, expected: Correctness, got: Correctness, found: Findings) -> None:
    for name in ("max_abs_diff", "mean_abs_diff"):
        found.close(f"{where}.{name}", getattr(expected, name), getattr(got, name), "by the scores of the inputs")
