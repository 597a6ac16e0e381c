"""Where JAX is better and worse, and by how much: every figure that both backends have, largest difference first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prefixwise.bench.artifacts import Comparison, Correctness, PortableRow
from prefixwise.bench.report.agreement import correctness_state
from prefixwise.bench.report.comparison import METRICS, selected
from prefixwise.bench.report.document import NONE, Block, Paragraph, table
from prefixwise.bench.report.inputs import BACKEND_NAMES, BACKENDS
from prefixwise.bench.report.numbers import change_percent, figure, percent
from prefixwise.bench.report.races import THROUGHPUT

_EQUAL = 0.05  # percent
_REMARKS = {"differ": "scores are not within bounds", "not compared": "scores were not compared"}


@dataclass(frozen=True)
class Finding:
    """One figure at one place, of both backends."""

    where: str
    metric: str
    jax: float
    pytorch: float
    remark: str

    @property
    def change(self) -> float:
        return change_percent(self.jax, self.pytorch) or 0.0

    @property
    def gain(self) -> float:
        """Positive where JAX is better: more throughput, or less latency."""
        return self.change if self.metric == THROUGHPUT else -self.change

    def cells(self) -> tuple[str, ...]:
        name, unit = METRICS[self.metric]
        figures = (f"{figure(self.jax)} {unit}", f"{figure(self.pytorch)} {unit}", percent(self.change))
        return (self.where, name, *figures, self.remark or NONE)


def findings(comparison: Comparison) -> list[Finding]:
    """Every figure that both have, largest difference first."""
    found = [each for row in comparison.portable_view.rows for each in _of_row(row)]
    native = selected(comparison)
    found += _pairs("best native", native["jax"], native["pytorch"], comparison.best_native_view.correctness)
    return sorted(found, key=lambda each: -abs(each.change))


def _of_row(row: PortableRow) -> Iterator[Finding]:
    yield from _pairs(f"chunk size {row.client_chunk_size}", row.jax, row.pytorch, row.correctness)


def _pairs(
    where: str, jax: Mapping[str, Any] | None, pytorch: Mapping[str, Any] | None, scores: Correctness
) -> list[Finding]:
    """The remark says why a figure does not count, where it does not."""
    jax, pytorch = jax or {}, pytorch or {}
    remarks = [_REMARKS[state]] if (state := correctness_state(scores)) in _REMARKS else []
    for backend, row in zip(BACKENDS, (jax, pytorch), strict=True):
        if row and row.get("status", "ok") != "ok":
            remarks.append(f"some runs of {BACKEND_NAMES[backend]} failed")
    return [
        Finding(where, metric, jax[metric], pytorch[metric], "; ".join(remarks))
        for metric in METRICS
        if jax.get(metric) is not None and pytorch.get(metric)
    ]


def better_and_worse(comparison: Comparison) -> tuple[Block, ...]:
    """Two tables, and how they came about."""
    found = [each for each in findings(comparison) if abs(each.change) >= _EQUAL]
    better = [each for each in found if each.gain > 0]
    worse = [each for each in found if each.gain < 0]
    header = ("where", "figure", "JAX", "PyTorch", "change", "remark")
    words = (
        f"Of {len(found)} figures that differ, JAX is better in {len(better)} and worse in {len(worse)}. "
        "Largest difference first; more throughput is better, less latency is better."
    )
    return (
        Paragraph(words if found else "There is no figure in which the two can be told apart."),
        *table("Where JAX is better", header, [each.cells() for each in better], numeric=False),
        *table("Where JAX is worse", header, [each.cells() for each in worse], numeric=False),
    )
