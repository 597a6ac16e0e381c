"""A model on its mesh before any weight is read: sizes, choices, and the programs that follow from them.

`JaxBackend` adds the weights; `aot` compiles the programs for devices that are not attached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prefixwise.backends.jax.attention.api import choose_for_batch_prefixes
from prefixwise.backends.jax.attention.base import AttentionImplementation
from prefixwise.backends.jax.devices import DeviceChoice, Platform, kv_cache_tokens
from prefixwise.backends.jax.executables import ExecutableStore
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.kv_cache import KVCacheShape
from prefixwise.backends.jax.lora import check_lora, lora_shapes
from prefixwise.backends.jax.model import Transformer
from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.backends.jax.programs import Programs
from prefixwise.backends.jax.row_tiles import (
    ACCELERATOR_ROWS,
    COARSE_STEP,
    CPU_EXPERT_ROWS,
    CPU_SCORE_ROWS,
    CPU_SMALLEST,
    CPU_STEP,
    CPU_TILE_ROWS,
    INVARIANT_ROWS,
    RowTiles,
    dense_columns,
)
from prefixwise.backends.jax.weights import weight_shapes
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import (
    DEFAULT_TOKEN_BUDGETS,
    LEAST_STEP_TOKENS,
    STEP_SECONDS,
    BackendInfo,
    BackendOptions,
)
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, Layout
from prefixwise.forward.buckets import Buckets, token_buckets
from prefixwise.forward.fp8 import check_fp8_device, check_fp8_model
from prefixwise.models.config import ModelConfig

MAX_TABLE_ENTRIES_PER_PAGE = 2  # a page that several prefixes of a forward share has several entries
STEP_TOKENS: dict[Platform, int] = {"cpu": 2048, "gpu": 16_384, "tpu": 16_384}
MAX_WHOLE_ITEM: dict[Platform, int] = {"cpu": 512, "gpu": 1024, "tpu": 1024}  # tokens


class AttentionKind(TypedDict):
    """What decides which attention implementation can run."""

    platform: str
    dtype: jnp.dtype
    head_size: int
    is_plain: bool
    is_causal: bool


@dataclass(frozen=True, eq=False)
class Assembly:
    """Everything but the arrays."""

    config: ModelConfig
    mesh: Mesh
    dtype: jnp.dtype
    placement: HeadPlacement
    kv_cache: KVCacheShape
    programs: Programs
    info: BackendInfo

    @property
    def rows(self) -> RowTiles:
        return self.programs.transformer.rows

    def spec(self, batch: ForwardBatch, num_tokens: int) -> ProgramSpec:
        """The program for a batch whose largest data shard has so many tokens."""
        is_dense = batch.layout is Layout.PACKED and batch.mask == "dense"
        longest_sequence = int(np.diff(batch.sequence_starts).max()) if is_dense else 0
        fuses_heads = self.programs.transformer.fuses_heads
        reads_cache = _reads_kv_cache(batch)
        if fuses_heads and self.config.is_causal and not is_dense:
            reads_cache |= all(prefix.segment is None for prefix in batch.prefixes)  # nothing is read in the batch
        return ProgramSpec(
            num_tokens=Buckets.of(self.info).fit(num_tokens),
            reads="kv_cache" if reads_cache else "batch",
            writes_cache=bool(batch.cache_segments) or (reads_cache and fuses_heads),
            dense_columns=dense_columns(longest_sequence) if is_dense else 0,
            is_embedded=batch.embed_overrides is not None,
            has_lora=batch.lora_slots is not None,
        )


def assemble(
    config: ModelConfig,
    options: BackendOptions,
    choice: DeviceChoice,
    mesh: Mesh,
    dtype: jnp.dtype,
    attention: AttentionImplementation,
    compilation_cache_dir: str | None = None,
    store: ExecutableStore | None = None,
    *,
    has_gated_gemm: bool = False,
) -> Assembly:
    """`attention`: the implementation for prefixes in the KV cache; `has_gated_gemm`: that of `gated_gemm.py`. The mesh
    may be of described devices (`aot`)."""
    check_lora(config, options)
    if options.quantization is not None:
        check_fp8_device(choice.platform, choice.capability)
        check_fp8_model(config, str(dtype), options.tp_size)
    placement = HeadPlacement.plan(config.num_heads, config.num_kv_heads, options.tp_size)
    rows = _row_tiles(choice.platform, batch_invariant=bool(options.batch_invariant))
    transformer = _transformer(config, choice, dtype, placement, rows, attention, has_gated_gemm)
    kv_cache = _kv_cache_shape(config, options, choice, dtype, placement)
    programs = Programs(
        mesh,
        transformer,
        MAX_TABLE_ENTRIES_PER_PAGE * kv_cache.num_pages,
        choice.platform,
        weight_shapes(config, dtype, mesh, placement, is_fp8=options.quantization is not None),
        kv_cache.arrays(mesh),
        lora_shapes(config, options, dtype, mesh),
        options.max_loras,
        store or ExecutableStore(),
    )
    info = _info(config, options, choice, programs, kv_cache, compilation_cache_dir)
    return Assembly(config, mesh, dtype, placement, kv_cache, programs, info)


def attention_kind(config: ModelConfig, choice: DeviceChoice, dtype: jnp.dtype) -> AttentionKind:
    """What decides which implementations of attention can run the model."""
    return {
        "platform": choice.kernel_platform,
        "dtype": dtype,
        "head_size": config.head_size,
        "is_plain": config.has_plain_attention,
        "is_causal": config.is_causal,
    }


def _transformer(
    config: ModelConfig,
    choice: DeviceChoice,
    dtype: jnp.dtype,
    placement: HeadPlacement,
    rows: RowTiles,
    attention: AttentionImplementation,
    has_gated_gemm: bool,
) -> Transformer:
    return Transformer(
        config,
        placement.kv_heads_per_shard,
        placement.heads_per_kv,
        placement.tp_size,
        rows,
        attention,
        batch_attention=choose_for_batch_prefixes(attention, **attention_kind(config, choice, dtype)),
        fuses_heads=choice.kernel_platform in ("gpu", "hopper") and dtype in (jnp.bfloat16, jnp.float16),
        kv_copies=placement.kv_copies,
        fuses_gate=has_gated_gemm and rows.token_rows is None,
    )


def _kv_cache_shape(
    config: ModelConfig, options: BackendOptions, choice: DeviceChoice, dtype: jnp.dtype, placement: HeadPlacement
) -> KVCacheShape:
    token_bytes = 2 * config.num_layers * placement.kv_heads_per_shard * config.head_size * dtype.itemsize
    num_tokens = KV_BLOCK_SIZE  # the least; without shared prefixes nothing is cached
    if config.is_causal:
        num_tokens = kv_cache_tokens(config, token_bytes, choice, options.prefix_cache_bytes)
    return KVCacheShape.of(
        num_layers=config.num_layers,
        num_tokens=num_tokens,
        heads=(options.tp_size * placement.kv_heads_per_shard, config.head_size),
        dtype=jnp.dtype(jnp.uint16) if choice.platform == "cpu" and dtype == jnp.bfloat16 else dtype,
    )


def _info(
    config: ModelConfig,
    options: BackendOptions,
    choice: DeviceChoice,
    programs: Programs,
    kv_cache: KVCacheShape,
    compilation_cache_dir: str | None,
) -> BackendInfo:
    budget = options.token_budget or DEFAULT_TOKEN_BUDGETS[choice.platform]
    _check_budget(budget, programs.transformer)
    rows = programs.transformer.rows
    return BackendInfo(
        name="jax",
        device=choice.title(programs.mesh.size),
        device_kind=choice.platform,
        dtype=str(programs.weights.embedding.dtype),
        algorithms_bit_equal=choice.platform == "cpu",
        token_multiple=CPU_TILE_ROWS if choice.platform == "cpu" else ACCELERATOR_ROWS,
        token_budget=budget,
        token_buckets=_token_buckets(config, choice.platform, budget, rows, is_coarse=options.warmup == "fast"),
        num_copies=options.dp_size,
        num_kv_blocks=kv_cache.num_pages,
        kv_block_bytes=kv_cache.page_bytes(options.tp_size),
        max_kv_blocks_read=programs.max_kv_blocks,
        attention=programs.transformer.attention.name,
        quantization=options.quantization,
        batch_invariant=rows.token_rows is not None,
        compilation_cache_dir=compilation_cache_dir,
        step_tokens=options.token_budget or STEP_TOKENS[choice.platform],
        max_whole_item=MAX_WHOLE_ITEM[choice.platform],
        step_seconds=None if _num_processes(programs.mesh) > 1 else STEP_SECONDS[choice.platform],
        least_step_tokens=LEAST_STEP_TOKENS,
        joins_prefill=choice.platform == "gpu" and options.dp_size == 1,
        async_scheduling=choice.platform != "cpu",
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank if options.max_loras else 0,
    )


def _num_processes(mesh: Mesh) -> int:
    """Processes that share the mesh must fill equal steps, and each measures other times."""
    return len({device.process_index for device in mesh.devices.flat})


def _check_budget(budget: int, transformer: Transformer) -> None:
    """A forward with more tokens than its attention takes uses another implementation, which gives other bits. Only a
    sequence that is too long by itself may cause that, never its neighbours, so the budget must fit."""
    for attention in (transformer.attention, transformer.batch_attention):
        if attention.max_tokens is not None and budget > attention.max_tokens:
            raise BackendError(
                f"token_budget must be at most {attention.max_tokens} with attention {attention.name!r}, got {budget}"
            )


def _token_buckets(
    config: ModelConfig, platform: Platform, budget: int, rows: RowTiles, *, is_coarse: bool
) -> tuple[int, ...]:
    """A sequence that is longer than the budget runs alone, so the longest context needs a bucket too.

    One token more: an empty item behind a query that fills the context computes the prefix's last token again.
    """
    largest = max(budget, config.max_context_len + 1)
    if platform == "cpu":
        return token_buckets(largest, smallest=CPU_SMALLEST, step=CPU_STEP)
    smallest = ACCELERATOR_ROWS
    if rows.token_rows is not None:
        # Two tiles at least: XLA would unroll a loop of one, and fuse its GEMMs with their neighbours.
        smallest = 2 * rows.token_rows
    return token_buckets(largest, smallest=smallest, step=COARSE_STEP if is_coarse else None)


def _row_tiles(platform: Platform, *, batch_invariant: bool) -> RowTiles:
    if platform == "cpu":
        return RowTiles(CPU_TILE_ROWS, score_rows=CPU_SCORE_ROWS, expert_rows=CPU_EXPERT_ROWS)
    # This many rows take hardly longer than half of them, and most forwards score no more.
    score_rows = 2 * ACCELERATOR_ROWS
    return RowTiles(INVARIANT_ROWS if batch_invariant else None, score_rows=score_rows)


def _reads_kv_cache(batch: ForwardBatch) -> bool:
    """A forward that caches segments writes them before attention, and reads all prefixes from the KV cache."""
    return bool(batch.cache_segments) or any(prefix.blocks for prefix in batch.prefixes)
