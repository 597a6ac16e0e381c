"""All programs that forwards of some kinds can need, so that no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from prefixwise.backends.jax.buckets import dense_columns_up_to
from prefixwise.backends.jax.inputs import ForwardInputs, ProgramSpec
from prefixwise.backends.jax.mesh import DATA
from prefixwise.backends.jax.model import LastLayer
from prefixwise.backends.jax.programs import HeadSpec
from prefixwise.backends.jax.runner import Runner
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.backend import Program
from prefixwise.forward.kv_pages import NOT_CACHED
from prefixwise.forward.tiles import Tiles


def list_programs(runner: Runner, buckets: Sequence[int], max_dense_row_len: int) -> list[Program]:
    """Every trunk, behind those of each size the scoring of some of its tokens, and the two programs of the head."""
    preparation, programs = _Preparation(runner), []
    for num_tokens in buckets:
        specs = _specs(num_tokens, max_dense_row_len)
        programs += [_program(runner, spec, partial(preparation.trunk, spec)) for spec in specs]
        programs.append(_program(runner, HeadSpec("score", num_tokens), partial(preparation.score, specs[-1])))
    smallest = ProgramSpec(buckets[0], reads="pool", keeps=False)
    return [
        *programs,
        _program(runner, HeadSpec("labels"), partial(preparation.labels, smallest)),
        _program(runner, HeadSpec("normalizers"), partial(preparation.normalizers, smallest)),
    ]


def _program(runner: Runner, spec: ProgramSpec | HeadSpec, prepare: Callable[[], object]) -> Program:
    return Program(spec.title, partial(runner.programs.lower, spec), prepare)


def _specs(num_tokens: int, max_dense_row_len: int) -> list[ProgramSpec]:
    """Prefill, whether or not something is scored at once; rows with each width of a dense mask and without one; and
    extend."""
    rows = ProgramSpec(num_tokens, reads="batch", keeps=False)
    masked = [rows.with_mask(columns) for columns in dense_columns_up_to(min(num_tokens, max_dense_row_len))]
    prefill, extend = (ProgramSpec(num_tokens, reads="pool", keeps=keeps) for keeps in (True, False))
    return [prefill, *masked, rows, extend]


class _Preparation:
    """Runs programs on batches of one token, so that their loops are entered, too."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._inputs = runner.head_inputs([np.zeros(1, np.int64)] * runner.mesh.shape[DATA], np.zeros(1, np.int32))

    def trunk(self, spec: ProgramSpec) -> LastLayer:
        inputs = _one_token(spec)
        num_shards = self._runner.mesh.shape[DATA]
        masks = [np.zeros((spec.num_tokens, spec.dense_columns), np.bool_)] * num_shards if spec.dense_columns else []
        last = self._runner.trunk(spec, [inputs] * num_shards, masks)
        jax.block_until_ready(self._runner.pool.arrays)
        return last

    def score(self, spec: ProgramSpec) -> list[jax.Array]:
        """What a head's programs take."""
        return jax.block_until_ready(self._runner.hidden(self.trunk(spec), self._inputs))

    def labels(self, spec: ProgramSpec) -> None:
        self._runner.fetch(self._runner.label_logits(self.score(spec), self._inputs))

    def normalizers(self, spec: ProgramSpec) -> None:
        self._runner.fetch(self._runner.logsumexp(self.score(spec)))


def _one_token(spec: ProgramSpec) -> ForwardInputs[Int32Array]:
    """A segment of one token, which reads no prefix; nothing is kept."""
    nothing, zero, one = np.zeros(0, np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    tiles = Tiles(*[nothing] * len(Tiles._fields))
    return ForwardInputs(
        num_token_blocks=one,
        num_rows=zero,
        token_ids=zero,
        positions=zero,
        cache_slots=np.full(spec.num_tokens * spec.keeps, NOT_CACHED, np.int32),
        token_row=nothing,
        row_starts=nothing,
        tiles=tiles._replace(counts=np.array([1, 0, 0], np.int32), narrow_start=zero, narrow_len=one),
    )
