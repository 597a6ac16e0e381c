"""Servers against Hugging Face transformers on the same checkpoint: the second half of `validate combine`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from prefixwise.bench.kinds.base import Artifact, Scores
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.named import Named, subject
from prefixwise.bench.render.document import Block, table
from prefixwise.bench.render.numbers import difference
from prefixwise.bench.rules import MAX_ABS_DIFF, score_differences


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
    # The vectors behind the metrics: what the two servers said, and what the reference says.
    jax_serial_scores: Scores | None = None
    jax_multi_scores: Scores | None = None
    torch_serial_scores: Scores | None = None
    torch_multi_semantic_scores: Scores | None = None
    reference: dict[str, Any] = Field(default_factory=dict)


# Where a parity artifact has the vectors behind a difference, it is computed again.
_PARITY_VECTORS = {
    "max_abs_diff_jax_serial_vs_torch_serial": ("jax_serial_scores", "torch_serial_scores"),
    "max_abs_diff_jax_multi_vs_torch_serial": ("jax_multi_scores", "torch_serial_scores"),
    "max_abs_diff_jax_multi_vs_torch_multi_semantic": ("jax_multi_scores", "torch_multi_semantic_scores"),
}


def check_parity(parity: Parity, found: Findings) -> None:
    """Check the differences against the score vectors, where the file has them."""
    for name, (one, other) in _PARITY_VECTORS.items():
        value: float = getattr(parity, name)
        if value < 0:
            found.fail(name, "0 or more", value)
        scores, reference = found.document.get(one), found.document.get(other)
        if scores is not None and reference is not None:
            _check_difference(name, value, (one, scores), (other, reference), found)
        if value > MAX_ABS_DIFF:
            found.warn(name, f"at most {MAX_ABS_DIFF}", f"{value:.6g}")


def _check_difference(
    name: str, value: float, scores: tuple[str, Any], reference: tuple[str, Any], found: Findings
) -> None:
    names = f"{scores[0]} and {reference[0]}"
    try:
        expected = score_differences(scores[1], reference[1]).max_abs_diff
    except (ValueError, TypeError) as error:
        found.fail(names, "two tables of numbers, of one shape", error)
        return
    found.close(name, expected, value, f"by {names}")


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
