"""`JaxBackend`: a checkpoint on one or many TPUs, GPUs or CPUs, ready to run forwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from prefixwise.backends.jax.assembly import Assembly, assemble, attention_kind
from prefixwise.backends.jax.attention.api import choose_implementation, choose_working, probe_attention
from prefixwise.backends.jax.attention.base import AttentionImplementation
from prefixwise.backends.jax.attention.dense import make_mask
from prefixwise.backends.jax.devices import DeviceChoice, resolve_dtype, set_compilation_cache
from prefixwise.backends.jax.executables import ExecutableStore
from prefixwise.backends.jax.gated_gemm import has_gated_gemm
from prefixwise.backends.jax.inputs import ForwardInputs, ProgramSpec, host_inputs, split_batch
from prefixwise.backends.jax.invariant_rows import invariant_buckets
from prefixwise.backends.jax.kv_cache import JaxKVBlock, KVCache
from prefixwise.backends.jax.lora import LoraStore
from prefixwise.backends.jax.mesh import make_mesh, start_distributed
from prefixwise.backends.jax.model import LastLayer
from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.backends.jax.programs import COMPILER_OPTIONS
from prefixwise.backends.jax.runner import Floats, Runner, TileOutputs, list_programs
from prefixwise.backends.jax.weights import load_weights
from prefixwise.contract.ragged import Int32Array, Int64Array
from prefixwise.forward.backend import Backend, BackendOptions, Program
from prefixwise.forward.batch import ForwardBatch, ForwardOutput, RunningForward
from prefixwise.forward.kv_pages import batch_tiles, page_table
from prefixwise.forward.pooling import pooled_segments, read_tokens
from prefixwise.forward.tiles import HostTiles, cut_tiles
from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.config import ModelConfig
from prefixwise.models.lora import LoraAdapter
from prefixwise.models.weight_cache import with_bfloat16_weights

log = logging.getLogger("prefixwise")


class _HeadOutputs(NamedTuple):
    """What one head gives for all scored rows; `rows` are those that have this head."""

    rows: NDArray[np.bool_] | None  # [R]; None: all of them
    labels: TileOutputs  # logits of the distinct labels
    logsumexp: TileOutputs  # empty where the batch needs none
    vocabulary: TileOutputs = ()  # of a pass over the vocabulary, in place of labels and logsumexp


class _Sent(NamedTuple):
    """The results of a forward, on their way to the host."""

    heads: Sequence[_HeadOutputs]  # the model's, and those of LoRA adapters that have their own
    columns: NDArray[Any]  # [R, L], or [1, L] for all rows alike: which of the distinct labels each row asks for
    rows: list[Int64Array]  # per data shard: which of the batch's scored rows it computes
    hidden: TileOutputs = ()  # empty where the batch needs none


class JaxBackend(Backend):
    """Loads the weights when it is constructed; `start` runs forwards."""

    def __init__(self, checkpoint: Checkpoint, options: BackendOptions) -> None:
        if options.nnodes > 1:
            start_distributed(options.dist_init_addr, options.nnodes, options.node_rank)
        elif options.tp_size * options.dp_size > 1:  # else processes of a launcher are independent of each other
            start_distributed()
        self.config = config = checkpoint.config
        choice = DeviceChoice.resolve(options.device)
        cache_dir = set_compilation_cache(options.compilation_cache_dir, choice.platform)
        dtype = resolve_dtype(options.dtype, choice.platform)
        mesh = make_mesh(choice.devices, options.dp_size, options.tp_size)
        self._has_failed = False  # since the KV cache was last recovered
        store = ExecutableStore.of(cache_dir, mesh)
        attention = _choose_attention(options, config, choice, dtype, mesh.local_devices[0], store)
        is_gated = has_gated_gemm(config, options, choice, dtype, mesh.local_devices[0], store)
        make = partial(assemble, config, choice=choice, mesh=mesh, dtype=dtype, attention=attention, store=store)
        make = partial(make, has_gated_gemm=is_gated)
        self._assembly = _exact_assembly(
            partial(make, compilation_cache_dir=None if cache_dir is None else str(cache_dir)), options, choice
        )
        self._dp_size = options.dp_size
        if options.weight_cache and dtype == jnp.bfloat16:
            checkpoint = with_bfloat16_weights(checkpoint)
        self._runner = _make_runner(checkpoint, self._assembly, options)
        self.info = self._assembly.info

    def programs(self, *, max_dense_len: int, has_sequences: bool = True) -> Sequence[Program]:
        return list_programs(self._runner, self.info, max_dense_len=max_dense_len, has_sequences=has_sequences)

    def end_warm_up(self) -> None:
        programs = self._runner.programs
        if programs.num_loaded:
            log.info("warm-up: %d of %d programs were read from disk", programs.num_loaded, programs.num_compiled)
        programs.save()

    def start(self, batch: ForwardBatch) -> RunningForward:
        if self._has_failed:
            self._recover()
        parts = split_batch(batch, self._dp_size)
        spec = self._assembly.spec(batch, max(part.num_tokens for part, _ in parts))
        lens = np.diff(batch.segment_starts)
        blocks = tuple(self._runner.kv_cache.take([int(lens[segment]) for segment in batch.cache_segments]))
        try:
            last, sent = self._send(batch, parts, spec, blocks)
        except BaseException:
            self._give_up(blocks)
            self._recover()
            raise
        if sent is None:
            output = ForwardOutput(np.zeros(batch.label_ids.shape, np.float32), None, blocks)
            return RunningForward(blocks, partial(self._wait_for_trunk, last, output, blocks))
        return RunningForward(blocks, partial(self._wait, sent, blocks))

    def _send(
        self,
        batch: ForwardBatch,
        parts: Sequence[tuple[ForwardBatch, Int64Array]],
        spec: ProgramSpec,
        blocks: Sequence[JaxKVBlock],
    ) -> tuple[LastLayer, _Sent | None]:
        """Start all programs of the forward; None where it scores nothing."""
        shards = [self._inputs(part, spec, blocks) for part, _ in parts]
        shape = (spec.num_tokens, spec.dense_columns)
        masks = [make_mask(part, shape) for part, _ in parts] if spec.dense_columns else []
        x = self._runner.embed(spec, [part for part, _ in parts])
        last = self._runner.trunk(spec, shards, masks, x)  # first: the host prepares the rest while the devices compute
        if not len(batch.score_tokens):
            return last, None
        distinct, columns = _distinct_labels(batch.label_ids[:0] if batch.top_k else batch.label_ids)
        head_inputs = self._runner.head_inputs([self._scored(part) for part, _ in parts], distinct)
        has_lora = spec.has_lora and self.config.pooling != "mean"
        hidden = self._runner.hidden(last, head_inputs, has_lora=has_lora)
        pooled = self._runner.pooled(hidden) if batch.need_hidden else []
        heads = []
        for slot, rows in self._heads(batch):
            if batch.top_k:
                token_ids = [part.label_ids[:, 0] for part, _ in parts]
                found = self._runner.vocabulary(hidden, token_ids, batch.top_k, slot)
                heads.append(_HeadOutputs(rows, (), (), found))
                continue
            labels = self._runner.label_logits(hidden, head_inputs, slot)
            logsumexp = self._runner.logsumexp(hidden, slot) if batch.need_logsumexp else []
            heads.append(_HeadOutputs(rows, labels, logsumexp))
        return last, _Sent(heads, columns, [rows for _, rows in parts], pooled)

    def _scored(self, part: ForwardBatch) -> Int64Array:
        """What the scoring program reads: tokens [R], or starts and lengths of segments [2, R], or tokens and the slots
        of their LoRA adapters [2, R]."""
        pooling = self.config.pooling
        if pooling == "mean":
            return pooled_segments(part)
        tokens = read_tokens(part, pooling)
        return tokens if part.lora_slots is None else np.stack([tokens, part.lora_slots[tokens]])

    def _heads(self, batch: ForwardBatch) -> list[tuple[int, NDArray[np.bool_] | None]]:
        """The heads that scored rows have, by the slots of LoRA adapters (0: the model's), and the rows of each."""
        lora = self._runner.lora
        if lora is None or batch.lora_slots is None:
            return [(0, None)]
        slots = batch.lora_slots[batch.score_tokens]
        own = np.where(np.isin(slots, list(lora.heads)), slots, 0)
        return [(int(slot), own == slot) for slot in np.unique(own)]

    def load_lora(self, slot: int, adapter: LoraAdapter) -> None:
        assert self._runner.lora is not None, "adapters are loaded where there are slots for them"
        self._runner.lora.load(slot, adapter, self.config, self._runner.weights.head)

    def _wait_for_trunk(self, last: LastLayer, output: ForwardOutput, blocks: Sequence[JaxKVBlock]) -> ForwardOutput:
        try:
            jax.block_until_ready(last)
        except BaseException:
            self._give_up(blocks)
            raise
        self._runner.programs.trust()
        return output

    def _wait(self, sent: _Sent, blocks: tuple[JaxKVBlock, ...]) -> ForwardOutput:
        try:
            hidden = _in_order(self._runner.fetch(sent.hidden), sent.rows) if sent.hidden else None
            if sent.heads[0].vocabulary:
                return _vocabulary_output(self._fetch(sent, "vocabulary"), blocks, hidden)
            logits = self._fetch(sent, "labels")
            logsumexp = self._fetch(sent, "logsumexp") if sent.heads[0].logsumexp else None
        except BaseException:
            self._give_up(blocks)
            raise
        self._runner.programs.trust()
        return ForwardOutput(_take_columns(logits, sent.columns), logsumexp, blocks, hidden)

    def _fetch(self, sent: _Sent, kind: Literal["labels", "logsumexp", "vocabulary"]) -> Floats:
        """The rows of the batch, each from its head."""
        found = [_in_order(self._runner.fetch(getattr(head, kind)), sent.rows) for head in sent.heads]
        if len(found) == 1:
            return found[0]
        whole = np.empty_like(found[0])
        for head, rows in zip(sent.heads, found, strict=True):
            whole[head.rows] = rows[head.rows]
        return whole

    def _give_up(self, blocks: Sequence[JaxKVBlock]) -> None:
        """After a failure: release the blocks, whose contents are undefined. This may run on any thread, so the next
        forward recovers the KV cache."""
        for block in blocks:
            block.release()
        self._has_failed = True

    def _recover(self) -> None:
        self._has_failed = False
        self._runner.kv_cache.recover()
        self._runner.programs.distrust()

    def synchronize(self) -> None:
        try:
            jax.block_until_ready(self._runner.kv_cache.arrays)
        except Exception:
            self._recover()  # else the next forward would read the arrays of the failed one
            raise

    def memory_stats(self) -> Mapping[str, int]:
        found = [device.memory_stats() or {} for device in self._runner.mesh.local_devices]
        names = {"bytes_in_use": "bytes_in_use", "peak_bytes_in_use": "peak_bytes", "bytes_limit": "bytes_limit"}
        return {
            name: sum(each[key] for each in found) for key, name in names.items() if all(key in each for each in found)
        }

    @property
    def num_compilations(self) -> int:
        return self._runner.programs.num_compiled

    @property
    def is_compiling(self) -> bool:
        return self._runner.programs.is_compiling

    def is_out_of_memory(self, error: BaseException) -> bool:
        is_device = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
        return is_device or super().is_out_of_memory(error)

    def close(self) -> None:
        self._runner.programs.store.close()
        del self._runner

    def _inputs(self, part: ForwardBatch, spec: ProgramSpec, blocks: Sequence[JaxKVBlock]) -> ForwardInputs[Int32Array]:
        addresses = [block.lease.address for block in blocks]
        tiles = self._tiles(part, spec, dict(zip(part.cache_segments, addresses, strict=True)))
        tile_rows = self._assembly.rows.token_rows or spec.num_tokens
        return host_inputs(part, spec, tiles, addresses, tile_rows)

    def _tiles(self, part: ForwardBatch, spec: ProgramSpec, new_pages: Mapping[int, int]) -> HostTiles:
        """`new_pages`: addresses of the pages of the segments to cache."""
        needs_tiles = self._runner.programs.attention(spec).needs_padding_tiles
        padding = spec.num_tokens - part.num_tokens if needs_tiles else 0
        is_kv_cache, kv_cache = spec.reads == "kv_cache", self._runner.kv_cache
        lists = page_table(part, new_pages, kv_cache.address) if is_kv_cache else batch_tiles(part)
        return cut_tiles(part, self._runner.programs.tile_sizes(spec), lists, padding)


def _exact_assembly(
    make: Callable[[BackendOptions], Assembly], options: BackendOptions, choice: DeviceChoice
) -> Assembly:
    """With `batch_invariant` on a GPU in half precision, where it is the default: buckets whose GEMMs agree, if there
    are such. Else tiles of fixed rows, if the options ask for it."""
    assembly = make(replace(options, batch_invariant=False)) if choice.platform == "gpu" else make(options)
    if choice.platform != "gpu" or options.batch_invariant is False:
        return assembly
    if assembly.dtype != jnp.float32 and not options.max_loras:  # theirs are other GEMMs
        info, device = assembly.info, assembly.mesh.local_devices[0]
        layers = assembly.programs.weights.layers
        sizes, of_platform = info.token_buckets, COMPILER_OPTIONS[choice.platform]
        fuses_gate = assembly.programs.transformer.fuses_gate
        buckets = assembly.programs.store.recall(
            f"invariant buckets: {layers} {assembly.dtype} {sizes} {of_platform} {fuses_gate}",
            lambda: invariant_buckets(layers, assembly.dtype, sizes, device, fuses_gate),
        )
        if buckets is not None:
            return replace(assembly, info=replace(info, token_buckets=tuple(buckets), batch_invariant=True))
    return make(options) if options.batch_invariant else assembly


def _make_runner(checkpoint: Checkpoint, assembly: Assembly, options: BackendOptions) -> Runner:
    """Load the weights and allocate the KV cache, and the slots of LoRA adapters, on the mesh."""
    mesh, shapes = assembly.mesh, assembly.programs.lora
    is_fp8 = options.quantization is not None
    weights = load_weights(checkpoint, assembly.dtype, mesh, assembly.placement, is_fp8=is_fp8)
    lora = None if shapes is None else LoraStore.of(mesh, shapes, options)
    return Runner(mesh, weights, KVCache(mesh, assembly.kv_cache), assembly.programs, lora)


def _choose_attention(
    options: BackendOptions,
    config: ModelConfig,
    choice: DeviceChoice,
    dtype: jnp.dtype,
    device: jax.Device,
    store: ExecutableStore,
) -> AttentionImplementation:
    """The named implementation, else the best one that works with the heads of one device."""
    kind = attention_kind(config, choice, dtype)
    if options.attention is not None:
        return choose_implementation(options.attention, **kind)
    placement = HeadPlacement.plan(config.num_heads, config.num_kv_heads, options.tp_size)
    heads = placement.kv_heads_per_shard, placement.heads_per_kv, config.head_size

    def run_probe(candidate: AttentionImplementation) -> bool:
        with jax.default_device(device):
            probe_attention(candidate, heads, dtype)
        return True

    def probe(candidate: AttentionImplementation) -> None:
        store.recall(f"attention works: {candidate} {heads} {dtype}", partial(run_probe, candidate))

    return choose_working(**kind, probe=probe)


def _distinct_labels(label_ids: Int32Array) -> tuple[Int32Array, NDArray[Any]]:
    """The distinct labels of all rows [R, L], and `_Sent.columns`."""
    is_one_pattern = (label_ids == label_ids[:1]).all()  # as in most requests
    patterns = label_ids[:1] if is_one_pattern else label_ids
    distinct, columns = np.unique(patterns, return_inverse=True)
    return distinct, columns.reshape(patterns.shape)


def _take_columns(logits: Floats, columns: NDArray[Any]) -> Floats:
    """Logits [R, distinct labels] of the labels that each row asks for, [R, L]; `_Sent.columns`."""
    return logits[:, columns[0]] if len(columns) == 1 else np.take_along_axis(logits, columns, 1)


def _vocabulary_output(found: Floats, blocks: tuple[JaxKVBlock, ...], hidden: Floats | None) -> ForwardOutput:
    """[R, 2 + 2 K]: the columns of `score_vocabulary`."""
    top_logits, top_ids = np.split(found[:, 2:], 2, axis=1)
    return ForwardOutput(found[:, :1], found[:, 1], blocks, hidden, top_logits, top_ids.astype(np.int32))


def _in_order(found: Floats, rows: Sequence[Int64Array]) -> Floats:
    """[dp, T, ..] to the scored rows of the batch; each shard computed some of them."""
    if len(rows) == 1:  # one shard computed all
        return found[0, : len(rows[0])]
    ordered = np.empty((sum(map(len, rows)), *found.shape[2:]), np.float32)
    for shard, places in zip(found, rows, strict=True):
        ordered[places] = shard[: len(places)]
    return ordered
