"""Servers against Hugging Face transformers on the same checkpoint: the second half of `validate combine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from prefixwise.bench.kinds.base import Artifact, Scores
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.named import Named, subject
from prefixwise.bench.render.document import Block, table
from prefixwise.bench.render.numbers import difference
from prefixwise.bench.rules import MAX_ABS_DIFF, item_differences, score_differences


class Parity(Artifact):
    """`validate combine`, the second half: against transformers on the same checkpoint."""

    model: str | None = None
    max_abs_diff_jax_serial_vs_torch_serial: float
    max_abs_diff_jax_multi_vs_torch_serial: float
    max_abs_diff_jax_multi_vs_torch_multi_semantic: float
    mean_abs_diff_jax_serial_vs_torch_serial: float | None = None
    mean_abs_diff_jax_multi_vs_torch_multi_semantic: float | None = None
    generated_at_utc: str | None = None
    labels: list[int] | None = None
    delimiter: int | None = None
    query_ids: list[int] | None = None
    item_ids: list[list[int]] | None = None
    # The vectors behind the metrics: what the two servers said, what the reference says, and the items' differences.
    jax_serial_scores: Scores | None = None
    jax_multi_scores: Scores | None = None
    torch_serial_reference_scores: Scores | None = None
    torch_multi_semantic_reference_scores: Scores | None = None
    abs_diff_jax_serial_vs_torch_serial: list[float] | None = None
    abs_diff_jax_multi_vs_torch_serial: list[float] | None = None
    abs_diff_jax_multi_vs_torch_multi_semantic: list[float] | None = None
    reference: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, found: object) -> object:
        """Take the names of prefixwise 0.1, too."""
        if not isinstance(found, Mapping):
            return found
        return {_OLD_NAMES.get(name, name): value for name, value in found.items()}

    def recomputed(self) -> Parity:
        """With the differences computed again, from the scores or the items' differences where the file has them.

        Only for a file that `check_parity` finds no error in.
        """
        largest = {}
        for pair, names in _PARITY_VECTORS.items():
            scores, reference = (getattr(self, name) for name in names)
            has_scores = scores is not None and reference is not None
            diffs = item_differences(scores, reference) if has_scores else getattr(self, f"abs_diff_{pair}")
            if diffs:
                largest[f"max_abs_diff_{pair}"] = max(diffs)
        return self.model_copy(update=largest)


_OLD_NAMES = {
    "torch_serial_scores": "torch_serial_reference_scores",
    "torch_multi_semantic_scores": "torch_multi_semantic_reference_scores",
}


# Where a parity artifact has the vectors behind a difference, it is computed again.
_PARITY_VECTORS = {
    "jax_serial_vs_torch_serial": ("jax_serial_scores", "torch_serial_reference_scores"),
    "jax_multi_vs_torch_serial": ("jax_multi_scores", "torch_serial_reference_scores"),
    "jax_multi_vs_torch_multi_semantic": ("jax_multi_scores", "torch_multi_semantic_reference_scores"),
}


def check_parity(parity: Parity, found: Findings) -> None:
    """Check the differences against the score vectors, where the file has them."""
    for pair, vectors in _PARITY_VECTORS.items():
        name = f"max_abs_diff_{pair}"
        value: float = getattr(parity, name)
        if value < 0:
            found.fail(name, "0 or more", value)
        average: float | None = getattr(parity, f"mean_abs_diff_{pair}", None)
        if average is not None and not 0 <= average <= value * (1 + 1e-9):
            found.fail(f"mean_abs_diff_{pair}", f"from 0 to the maximum, {value:.6g}", average)
        _check_vectors(parity, pair, vectors, found)
        if value > MAX_ABS_DIFF:
            found.warn(name, f"at most {MAX_ABS_DIFF}", f"{value:.6g}")


def _check_vectors(parity: Parity, pair: str, vectors: tuple[str, str], found: Findings) -> None:
    scores, reference = (getattr(parity, name) for name in vectors)
    diffs: list[float] | None = getattr(parity, f"abs_diff_{pair}")
    if scores is None or reference is None:
        if diffs is not None:
            name = f"max_abs_diff_{pair}"
            found.close(name, max(diffs, default=None), getattr(parity, name), f"of abs_diff_{pair}")
        return
    names = " and ".join(vectors)
    try:
        expected = item_differences(scores, reference)
    except ValueError:
        found.fail(names, "two tables of one shape", "others")
        return
    if not expected:
        found.fail(names, "the scores of one item at least", "none")
        return
    largest, average = f"max_abs_diff_{pair}", f"mean_abs_diff_{pair}"
    found.close(largest, max(expected), getattr(parity, largest), f"by {names}")
    if getattr(parity, average, None) is not None:
        by_scores = score_differences(scores, reference).mean_abs_diff
        found.close(average, by_scores, getattr(parity, average), f"by {names}")
    each = f"abs_diff_{pair}"
    if diffs is not None:
        found.same(f"{each} length", len(expected), len(diffs), f"by {names}")
        for index, (again, diff) in enumerate(zip(expected, diffs, strict=False)):
            found.close(f"{each}[{index}]", again, diff, f"by {names}")


def parity_table(found: Named[Parity], *, several: bool) -> tuple[Block, ...]:
    """The fields are named after JAX, whatever the server's backend was."""
    who, content = found.name if several else "JAX", found.content
    rows = [
        [f"{who} serial against transformers", difference(content.max_abs_diff_jax_serial_vs_torch_serial)],
        [f"{who} multi-item against transformers", difference(content.max_abs_diff_jax_multi_vs_torch_serial)],
        [
            f"{who} multi-item against transformers on the same prompt",
            difference(content.max_abs_diff_jax_multi_vs_torch_multi_semantic),
        ],
    ]
    title = ", ".join(filter(None, ("Parity", subject(content.model, found.name, several))))
    return table(title, ("scores", "max abs diff"), rows)
