"""A model on its mesh, as far as it is known before a weight is read: sizes, choices, and the programs that follow.

`JaxBackend` fills it with weights; `aot` compiles its programs for devices that are not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prefixwise.backends.jax import buckets
from prefixwise.backends.jax.attention.api import choose_for_rows
from prefixwise.backends.jax.attention.base import AttentionImplementation
from prefixwise.backends.jax.devices import DeviceChoice, Platform, pool_tokens
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.kv_cache import KVCacheShape
from prefixwise.backends.jax.model import Transformer
from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.backends.jax.programs import Programs
from prefixwise.backends.jax.row_blocks import RowBlocks
from prefixwise.backends.jax.weights import weight_shapes
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import DEFAULT_TOKEN_BUDGETS, BackendInfo, BackendOptions
from prefixwise.forward.batch import ForwardBatch, Layout
from prefixwise.forward.buckets import Buckets, token_buckets
from prefixwise.models.config import ModelConfig

MAX_BLOCKS_PER_PAGE = 2  # prefixes of one forward may share pages, which are then listed more than once
STEP_TOKENS: dict[Platform, int] = {"cpu": 2048, "gpu": 16_384, "tpu": 16_384}


class AttentionKind(TypedDict):
    """What decides which attention can run."""

    platform: str
    dtype: jnp.dtype
    head_size: int


@dataclass(frozen=True, eq=False)
class Assembly:
    """Everything but arrays."""

    config: ModelConfig
    mesh: Mesh
    dtype: jnp.dtype
    placement: HeadPlacement
    pool: KVCacheShape
    programs: Programs
    info: BackendInfo

    @property
    def rows(self) -> RowBlocks:
        return self.programs.transformer.rows

    def spec(self, batch: ForwardBatch, num_tokens: int) -> ProgramSpec:
        """The program for a batch, of which the largest data shard has so many tokens."""
        is_dense = batch.layout is Layout.PACKED and batch.mask == "dense"
        longest_row = int(np.diff(batch.row_starts).max()) if is_dense else 0
        return ProgramSpec(
            num_tokens=Buckets.of(self.info).fit(num_tokens),
            reads="pool" if _reads_pool(batch) else "batch",
            keeps=bool(batch.cache_segments),
            dense_columns=buckets.dense_columns(longest_row) if is_dense else 0,
        )


def assemble(
    config: ModelConfig,
    options: BackendOptions,
    choice: DeviceChoice,
    mesh: Mesh,
    dtype: jnp.dtype,
    attention: AttentionImplementation,
    compilation_cache_dir: str | None = None,
) -> Assembly:
    """`attention`: what was chosen for prefixes in the pool. The mesh may be of devices that are only described."""
    placement = HeadPlacement.plan(config.num_heads, config.num_kv_heads, options.tp_size)
    rows = _row_blocks(choice.platform, batch_invariant=options.batch_invariant)
    transformer = _transformer(config, choice, dtype, placement, rows, attention)
    pool = _pool_shape(config, options, choice, dtype, placement)
    programs = Programs(
        mesh,
        transformer,
        MAX_BLOCKS_PER_PAGE * pool.num_pages,
        choice.platform,
        weight_shapes(config, dtype, mesh, placement),
        pool.arrays(mesh),
    )
    info = _info(config, options, choice, programs, pool, compilation_cache_dir)
    return Assembly(config, mesh, dtype, placement, pool, programs, info)


def attention_kind(config: ModelConfig, choice: DeviceChoice, dtype: jnp.dtype) -> AttentionKind:
    """What to ask an attention implementation."""
    return {"platform": choice.kernel_platform, "dtype": dtype, "head_size": config.head_size}


def _transformer(
    config: ModelConfig,
    choice: DeviceChoice,
    dtype: jnp.dtype,
    placement: HeadPlacement,
    rows: RowBlocks,
    attention: AttentionImplementation,
) -> Transformer:
    return Transformer(
        config,
        placement.kv_heads_per_shard,
        placement.heads_per_kv,
        placement.tp_size,
        rows,
        attention,
        row_attention=choose_for_rows(attention, **attention_kind(config, choice, dtype)),
        fuses_heads=choice.kernel_platform in ("gpu", "hopper") and dtype in (jnp.bfloat16, jnp.float16),
    )


def _pool_shape(
    config: ModelConfig, options: BackendOptions, choice: DeviceChoice, dtype: jnp.dtype, placement: HeadPlacement
) -> KVCacheShape:
    token_bytes = 2 * config.num_layers * placement.kv_heads_per_shard * config.head_size * dtype.itemsize
    return KVCacheShape.of(
        num_layers=config.num_layers,
        num_tokens=pool_tokens(config, token_bytes, choice, options.prefix_cache_bytes),
        heads=(options.tp_size * placement.kv_heads_per_shard, config.head_size),
        dtype=jnp.dtype(jnp.uint16) if choice.platform == "cpu" and dtype == jnp.bfloat16 else dtype,
    )


def _info(
    config: ModelConfig,
    options: BackendOptions,
    choice: DeviceChoice,
    programs: Programs,
    pool: KVCacheShape,
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
        token_multiple=buckets.CPU_BLOCK_ROWS if choice.platform == "cpu" else buckets.ACCELERATOR_ROWS,
        token_budget=budget,
        token_buckets=_token_buckets(config, choice.platform, budget, rows, is_coarse=options.warmup == "fast"),
        num_copies=options.dp_size,
        num_kv_blocks=pool.num_pages,
        kv_block_bytes=pool.page_bytes(options.tp_size),
        max_kv_blocks_read=programs.max_pool_blocks,
        attention=programs.transformer.attention.name,
        compilation_cache_dir=compilation_cache_dir,
        step_tokens=options.token_budget or STEP_TOKENS[choice.platform],
        joins_prefill=choice.platform == "gpu" and options.dp_size == 1,
        async_scheduling=choice.platform != "cpu",
    )


def _check_budget(budget: int, transformer: Transformer) -> None:
    """A forward of more tokens than its attention takes has another attention, and other bits: it must be one row that
    is too long by itself, whoever its neighbours are."""
    for attention in (transformer.attention, transformer.row_attention):
        if attention.max_tokens is not None and budget > attention.max_tokens:
            raise BackendError(
                f"token_budget must be at most {attention.max_tokens} with attention {attention.name!r}, got {budget}"
            )


def _token_buckets(
    config: ModelConfig, platform: Platform, budget: int, rows: RowBlocks, *, is_coarse: bool
) -> tuple[int, ...]:
    """A row that is longer than the budget runs alone, so the longest context must have a bucket, too.

    One token more: an empty item behind a query that fills the context reads the prefix's last token twice.
    """
    largest = max(budget, config.max_context_len + 1)
    if platform == "cpu":
        return token_buckets(largest, smallest=buckets.CPU_SMALLEST, step=buckets.CPU_STEP)
    smallest = buckets.ACCELERATOR_ROWS
    if rows.token_rows is not None:
        # Two blocks at least: XLA would take a loop of one apart, and fuse its products with their neighbours.
        smallest = 2 * rows.token_rows
    return token_buckets(largest, smallest=smallest, step=buckets.COARSE_STEP if is_coarse else None)


def _row_blocks(platform: Platform, *, batch_invariant: bool) -> RowBlocks:
    if platform == "cpu":
        return RowBlocks(buckets.CPU_BLOCK_ROWS, score_rows=buckets.CPU_SCORE_ROWS)
    # So many are nearly as quick as half of them, and most forwards score no more.
    score_rows = 2 * buckets.ACCELERATOR_ROWS
    return RowBlocks(buckets.INVARIANT_ROWS if batch_invariant else None, score_rows=score_rows)


def _reads_pool(batch: ForwardBatch) -> bool:
    """What a forward keeps it writes to the pool before it attends, so that is where all of it is read. Rows that
    happen to share no prefix need no program of their own."""
    return bool(batch.cache_segments) or any(prefix.blocks for prefix in batch.prefixes)
