"""Starting programs and fetching their results: host arrays in, host arrays out, the KV cache passed from program to
program. And every program that forwards can need, for warm-up: no request waits for a compiler.

Only `fetch` waits for the devices. No program on a GPU has a loop whose length is data, since the driver would wait for
that number; each tile of scored rows is a run of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from prefixwise.backends.jax.head_gemms import LABEL_TILE
from prefixwise.backends.jax.inputs import ForwardInputs, ProgramSpec, override_inputs, pack
from prefixwise.backends.jax.kv_cache import KVCache
from prefixwise.backends.jax.lora import LoraArrays, LoraStore
from prefixwise.backends.jax.mesh import DATA, P, as_argument, put_sharded
from prefixwise.backends.jax.model import LastLayer, Transformer
from prefixwise.backends.jax.programs import HeadSpec, Programs
from prefixwise.backends.jax.row_tiles import dense_columns_up_to
from prefixwise.backends.jax.weights import ModelWeights
from prefixwise.contract.ragged import Int32Array, Int64Array
from prefixwise.forward.backend import BackendInfo, Program
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch
from prefixwise.forward.buckets import Buckets
from prefixwise.forward.kv_pages import NOT_CACHED
from prefixwise.forward.tiles import Tiles
from prefixwise.models.config import ModelConfig

log = logging.getLogger("prefixwise")

Floats = NDArray[np.float32]
TileOutputs = Sequence[Sequence[jax.Array]]  # [dp S, ..] each, by tile of scored rows, then by tile of labels


class HeadInputs(NamedTuple):
    """Each label tile serves all tiles of scored rows."""

    score_tiles: tuple[jax.Array | NDArray[np.int32], ...]  # [dp, S] tokens each
    label_tiles: tuple[jax.Array | NDArray[np.int32], ...]  # [LABEL_TILE] each


@dataclass(frozen=True, eq=False)
class Runner:
    """A model on its mesh."""

    mesh: Mesh
    weights: ModelWeights
    kv_cache: KVCache
    programs: Programs
    lora: LoraStore | None = None  # None: there are no slots for adapters

    def embed(self, spec: ProgramSpec, parts: Sequence[ForwardBatch]) -> jax.Array | None:
        """The embeddings [dp T, D] of a program that does not compute them. One of `parts` per data shard."""
        if not spec.is_embedded:
            return None
        embedding = self.weights.embedding
        tokens, rows = override_inputs(parts, spec.num_tokens, embedding.dtype)
        program = self.programs.embed(spec.num_tokens, rows.shape[1])
        return program(embedding, *(as_argument(self.mesh, each, P(DATA)) for each in (tokens, rows)))

    def trunk(
        self,
        spec: ProgramSpec,
        shards: Sequence[ForwardInputs[Int32Array]],
        masks: Sequence[NDArray[np.bool_]],
        x: jax.Array | None = None,
    ) -> LastLayer:
        """Still on the devices, [dp T, ..]; one of `shards` and `masks` (if any) per data shard. `x`: of `embed`."""
        packed = as_argument(self.mesh, pack(shards, self.programs.input_lens(spec)), P(DATA))
        mask = as_argument(self.mesh, np.concatenate(masks), P(DATA)) if masks else None
        run, lora = self.programs.trunk(spec), self._lora(spec.has_lora)
        last, self.kv_cache.arrays = run(self.weights, self.kv_cache.arrays, packed, mask, x, lora)
        return last

    def head_inputs(self, score_tokens: Sequence[Int64Array], label_ids: Int32Array) -> HeadInputs:
        """The inputs of the programs behind a trunk, made while the trunk runs.

        `score_tokens`: of each data shard [R], or [2, R]: starts and lengths of segments, or tokens and the slots of
        their LoRA adapters. Zeros pad them to the same whole number of tiles.
        """
        size = self.programs.transformer.rows.score_rows
        shards = [np.atleast_2d(each) for each in score_tokens]
        num_tiles = -(-max(shard.shape[1] for shard in shards) // size)
        tokens = np.zeros((num_tiles, len(shards), len(shards[0]), size), np.int32)
        for number, shard in enumerate(shards):
            for row, numbers in enumerate(shard):
                tokens[:, number, row].flat[: len(numbers)] = numbers
        tokens = tokens.reshape(num_tiles, len(shards), -1)
        labels = np.zeros((-(-len(label_ids) // LABEL_TILE), LABEL_TILE), np.int32)
        labels.flat[: len(label_ids)] = label_ids
        return HeadInputs(
            tuple(as_argument(self.mesh, tile, P(DATA)) for tile in tokens),
            tuple(as_argument(self.mesh, tile, P()) for tile in labels),
        )

    def _lora(self, has_lora: bool) -> LoraArrays | None:
        return self.lora.arrays if has_lora and self.lora is not None else None

    def head(self, slot: int) -> jax.Array:
        """The head of a LoRA adapter, or the model's own; 0: that."""
        return self.weights.head if self.lora is None else self.lora.heads.get(slot, self.weights.head)

    def hidden(self, last: LastLayer, inputs: HeadInputs, *, has_lora: bool = False) -> list[jax.Array]:
        """[dp S, D] of each tile of scored rows, still on the devices."""
        score = self.programs.score(len(last.x) // self.mesh.shape[DATA], has_lora=has_lora)
        return [score(self.weights, last, tokens, self._lora(has_lora)) for tokens in inputs.score_tiles]

    def label_logits(self, hidden: Sequence[jax.Array], inputs: HeadInputs, slot: int = 0) -> TileOutputs:
        """[dp S, LABEL_TILE] each, on their way to the host. `slot`: of the adapter whose head is read."""
        head, labels = self.head(slot), self.programs.labels
        return [[_send(labels(head, rows, ids)) for ids in inputs.label_tiles] for rows in hidden]

    def logsumexp(self, hidden: Sequence[jax.Array], slot: int = 0) -> TileOutputs:
        """[dp S] each, on their way to the host."""
        return [[_send(self.programs.logsumexp(self.head(slot), rows))] for rows in hidden]

    def vocabulary(
        self, hidden: Sequence[jax.Array], token_ids: Sequence[Int32Array], top_k: int, slot: int = 0
    ) -> TileOutputs:
        """[dp S, 2 + 2 K] each, on their way to the host. `token_ids`: of each data shard, for its scored tokens."""
        size, program = self.programs.transformer.rows.score_rows, self.programs.vocabulary(top_k)
        tiles = np.zeros((len(hidden), len(token_ids), size), np.int32)
        for number, shard in enumerate(token_ids):
            tiles[:, number].flat[: len(shard)] = shard
        sent = [put_sharded(self.mesh, tile.reshape(-1), P(DATA)) for tile in tiles]
        return [[_send(program(self.head(slot), *each))] for each in zip(hidden, sent, strict=True)]

    def pooled(self, hidden: Sequence[jax.Array]) -> TileOutputs:
        """The hidden states themselves, on their way to the host."""
        return [[_send(self.programs.gathered(rows))] for rows in hidden]

    def fetch(self, tiles: TileOutputs) -> Floats:
        """Wait for the tiles: [dp, rows, ..], labels side by side along the last axis."""
        num_shards = self.mesh.shape[DATA]
        found = [np.concatenate([np.asarray(array) for array in row], axis=-1) for row in tiles]
        return np.concatenate([each.reshape(num_shards, -1, *each.shape[1:]) for each in found], axis=1)


def _send(array: jax.Array) -> jax.Array:
    """Start the copy to the host."""
    array.copy_to_host_async()
    return array


def list_programs(runner: Runner, info: BackendInfo, *, max_dense_len: int, has_sequences: bool) -> list[Program]:
    """Every trunk, the scoring program of each bucket, and the two programs of the head."""
    warmup, programs, transformer = _Warmup(runner), [], runner.programs.transformer
    kinds = (False,) if runner.lora is None else (False, True)
    trunks = trunk_specs(transformer, info, max_dense_len=max_dense_len, has_sequences=has_sequences)
    for of_bucket, has_lora in product(trunks, kinds):
        specs = [replace(spec, has_lora=has_lora) for spec in of_bucket]
        programs += [_program(runner, spec, partial(warmup.trunk, spec)) for spec in specs]
        has_slots = has_lora and transformer.config.pooling != "mean"
        score = HeadSpec("score", specs[-1].num_tokens, has_lora=has_slots)
        programs.append(_program(runner, score, partial(warmup.score, specs[-1])))
    smallest = trunks[0][-1]
    return [
        *programs,
        _program(runner, HeadSpec("labels"), partial(warmup.labels, smallest)),
        _program(runner, HeadSpec("logsumexp"), partial(warmup.logsumexp, smallest)),
    ]


def _program(runner: Runner, spec: ProgramSpec | HeadSpec, run: Callable[[], object]) -> Program:
    def prepare() -> None:
        try:
            run()
        except Exception as error:  # of jax, and of many types
            if not runner.programs.recompile(spec):
                raise
            log.warning("the program %r, read from disk, does not run, and was compiled again: %s", spec.title, error)
            runner.kv_cache.recover()
            run()
        runner.programs.trust(spec)

    return Program(spec.title, partial(runner.programs.lower, spec), prepare)


def trunk_specs(
    transformer: Transformer, info: BackendInfo, *, max_dense_len: int, has_sequences: bool
) -> list[list[ProgramSpec]]:
    """By bucket: sequences with each width of a dense mask and without one; prefill, with or without scored tokens; and
    extend. A model without shared prefixes has only sequences.

    Where one kernel does RoPE and writes to the KV cache, prefill serves as extend, too, as nothing to cache costs it
    nothing, and as sequences without a prefix: with `has_sequences` False it is the only trunk.
    """
    largest, found = _largest_over_kv_cache(transformer.config, info), []
    for num_tokens in info.token_buckets:
        sequences = ProgramSpec(num_tokens, reads="batch", writes_cache=False)
        masked = [sequences.with_mask(columns) for columns in dense_columns_up_to(min(num_tokens, max_dense_len))]
        prefill = ProgramSpec(num_tokens, reads="kv_cache", writes_cache=True)
        specs: list[ProgramSpec] = []
        if not transformer.config.is_causal:
            specs = [sequences]
        elif has_sequences or not transformer.fuses_heads:
            specs = [*masked, sequences]
        if transformer.config.is_causal and num_tokens <= largest:
            specs += [prefill] if transformer.fuses_heads else [prefill, replace(prefill, writes_cache=False)]
        if specs:
            found.append(specs)
    return found


def _largest_over_kv_cache(config: ModelConfig, info: BackendInfo) -> int:
    """The bucket of the largest forward that reads or writes the KV cache: that of a step, or of an item in one piece.
    Where the KV cache does not hold a whole context, an item may be as long as that."""
    if info.max_prefix_len < config.max_context_len:
        return info.token_buckets[-1]
    return Buckets.of(info).fit(max(info.step_tokens, info.max_whole_item + KV_BLOCK_SIZE))


class _Warmup:
    """Runs programs on batches of one token, so that their loops are entered."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        is_pooled = runner.programs.transformer.config.pooling == "mean"
        tokens = np.zeros((2, 1) if is_pooled else 1, np.int64)
        num_shards, label = runner.mesh.shape[DATA], np.zeros(1, np.int32)
        self._inputs = runner.head_inputs([tokens] * num_shards, label)
        self._lora_inputs = runner.head_inputs([np.zeros((2, 1), np.int64)] * num_shards, label)

    def trunk(self, spec: ProgramSpec) -> LastLayer:
        inputs = _one_token(spec)
        num_shards = self._runner.mesh.shape[DATA]
        masks = [np.zeros((spec.num_tokens, spec.dense_columns), np.bool_)] * num_shards if spec.dense_columns else []
        last = self._runner.trunk(spec, [inputs] * num_shards, masks)
        jax.block_until_ready(self._runner.kv_cache.arrays)
        return last

    def score(self, spec: ProgramSpec) -> list[jax.Array]:
        """The hidden states that the programs of the head take."""
        has_lora = spec.has_lora and self._runner.programs.transformer.config.pooling != "mean"
        inputs = self._lora_inputs if has_lora else self._inputs
        return jax.block_until_ready(self._runner.hidden(self.trunk(spec), inputs, has_lora=has_lora))

    def labels(self, spec: ProgramSpec) -> None:
        self._runner.fetch(self._runner.label_logits(self.score(spec), self._inputs))

    def logsumexp(self, spec: ProgramSpec) -> None:
        self._runner.fetch(self._runner.logsumexp(self.score(spec)))


def _one_token(spec: ProgramSpec) -> ForwardInputs[Int32Array]:
    """A segment of one token that reads no prefix; nothing is cached."""
    nothing, zero, one = np.zeros(0, np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    tiles = Tiles(*[nothing] * len(Tiles._fields))
    return ForwardInputs(
        num_token_tiles=one,
        num_sequences=zero,
        token_ids=zero,
        positions=zero,
        cache_slots=np.full(spec.num_tokens * spec.writes_cache, NOT_CACHED, np.int32),
        token_sequence=nothing,
        sequence_starts=nothing,
        lora_slots=nothing,
        tiles=tiles._replace(counts=np.array([1, 0, 0], np.int32), narrow_start=zero, narrow_len=one),
    )
