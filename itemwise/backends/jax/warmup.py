"""All programs that forwards of some kinds can need, so that no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from itemwise.backends.base import Program
from itemwise.backends.jax.buckets import dense_columns_up_to
from itemwise.backends.jax.inputs import NOT_KEPT, ForwardInputs, ProgramSpec
from itemwise.backends.jax.mesh import DATA
from itemwise.backends.jax.runner import HeadInputs, Runner
from itemwise.backends.layout.tiles import Tiles
from itemwise.contract.ragged import Int32Array


def list_programs(runner: Runner, buckets: Sequence[int], max_dense_row_len: int) -> list[Program]:
    """Every trunk, and behind those of each size the two programs of the head."""
    preparation, programs = _Preparation(runner), []
    for num_tokens in buckets:
        specs = _specs(num_tokens, max_dense_row_len)
        programs += [Program(spec.title, partial(preparation.trunk, spec)) for spec in specs]
        programs += [
            Program(f"labels, {num_tokens} tokens", partial(preparation.labels, specs[-1])),
            Program(f"normalizers, {num_tokens} tokens", partial(preparation.normalizers, specs[-1])),
        ]
    return programs


def _specs(num_tokens: int, max_dense_row_len: int) -> list[ProgramSpec]:
    """Prefill, rows with each width of a dense mask and without one, and extend."""
    rows = ProgramSpec(num_tokens, reads="batch", keeps=False, scores=True)
    masked = [rows.with_mask(columns) for columns in dense_columns_up_to(min(num_tokens, max_dense_row_len))]
    prefill = ProgramSpec(num_tokens, reads="pool", keeps=True, scores=False)
    return [prefill, *masked, rows, ProgramSpec(num_tokens, reads="pool", keeps=False, scores=True)]


class _Preparation:
    """Runs programs on batches of one token, so that their loops are entered, too.

    A head's programs take the hidden states that a trunk has left.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last: tuple[int, jax.Array] | None = None  # tokens, and hidden states

    def trunk(self, spec: ProgramSpec) -> None:
        inputs = _one_token(spec)
        num_shards = self._runner.mesh.shape[DATA]
        masks = [np.zeros((spec.num_tokens, spec.dense_columns), np.bool_)] * num_shards if spec.dense_columns else []
        hidden = self._runner.hidden(spec, [inputs] * num_shards, masks)
        self._last = None
        if hidden is not None:
            self._last = spec.num_tokens, jax.block_until_ready(hidden)
        jax.block_until_ready(self._runner.pool.arrays)

    def labels(self, spec: ProgramSpec) -> None:
        self._runner.fetch(self._runner.label_logits(self._hidden(spec), self._head_inputs()))

    def normalizers(self, spec: ProgramSpec) -> None:
        self._runner.fetch(self._runner.log_normalizers(self._hidden(spec), self._head_inputs()))

    def _hidden(self, spec: ProgramSpec) -> jax.Array:
        if self._last is None or self._last[0] != spec.num_tokens:
            self.trunk(spec)
        assert self._last is not None, "a trunk that scores leaves hidden states"
        return self._last[1]

    def _head_inputs(self) -> HeadInputs:
        one_block = np.ones(self._runner.mesh.shape[DATA], np.int32)
        return self._runner.head_inputs(np.zeros(1, np.int32), one_block)


def _one_token(spec: ProgramSpec) -> ForwardInputs[Int32Array]:
    """A segment of one token, which reads no prefix, and is scored where that is possible; nothing is kept."""
    nothing, zero, one = np.zeros(0, np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    tiles = Tiles(*[nothing] * len(Tiles._fields))
    return ForwardInputs(
        num_token_blocks=one,
        num_score_blocks=one,
        num_rows=zero,
        token_ids=zero,
        positions=zero,
        score_tokens=zero[: int(spec.scores)],
        keep_slots=np.full(spec.num_tokens * spec.keeps, NOT_KEPT, np.int32),
        token_row=nothing,
        row_starts=nothing,
        tiles=tiles._replace(counts=np.array([1, 0, 0], np.int32), narrow_start=zero, narrow_len=one),
    )
