"""The prefix part of attention on Hopper GPUs (H100, H200): one Mosaic GPU kernel, after FlashAttention-3.

A CTA is three warpgroups. One copies keys and values from the pages of the KV cache into shared memory, two key tiles
ahead. The other two compute, each on 64 rows, and take turns: while one multiplies, the other computes its softmax.
CTAs are persistent: each takes every n-th *unit* of work, so that the next unit's queries are copied while this one's
rows are written:

    unit = tile of tokens that read the same tokens of one prefix x one query head, or two of one KV head

Every key tile is a page, copied by one instruction, as are the queries of a tile. Copies begin at multiples of eight
tokens, so a tile may have rows of another tile at its edges, which are computed and not written. The self part
(`gpu_self_attention.py`) was computed before; it is merged at a unit's end by LSE. A row's arithmetic follows from its
query and its prefix alone: key tiles are counted from the prefix's start, and no sum is split.

Keys of a last, partly filled tile are masked, and its values are set to zero in shared memory: the page may hold
anything behind them, NaN included.

In the kernel: `R` = 64 rows of a warpgroup, `C` = KEY_TILE keys of a tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from prefixwise.backends.jax.attention.hopper_units import (
    NUM_COMPUTE,
    NUM_SLOTS,
    ROWS,
    Barriers,
    Buffers,
    Inputs,
    Ref,
    Shape,
    for_each_unit,
)
from prefixwise.backends.jax.attention.hopper_workers import ComputeWorker, CopyWorker
from prefixwise.forward.tiles import KEY_TILE

NUM_CTAS = 132  # one for each multiprocessor of an H100 or H200
COMPUTE_REGISTERS, COPY_REGISTERS = 232, 40


def prefix_attention(inputs: Inputs, shape: Shape, interpret: Any = None) -> jax.Array:
    """[T, N, H]: both parts, merged. `inputs` are arrays; every token must be in a tile."""
    q, self_out = inputs.q, inputs.self_out
    buffers = _buffers(q.dtype, shape)

    def entry(*refs: Ref) -> None:
        *in_refs, out = refs
        pl.run_scoped(
            lambda b, s: _kernel(Inputs(*in_refs), out, Buffers(*b), Barriers(*s), shape),
            tuple(buffers),
            tuple(_barriers()),
            collective_axes="wg",
        )

    out: jax.Array = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(self_out.shape, self_out.dtype),
        grid=(shape.num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_COMPUTE + 1,
        thread_name="wg",
        compiler_params=_compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )(*inputs)
    return out


def _compiler_params() -> plgpu.CompilerParams:
    """No sum runs across warps, so reductions need hardly any shared memory."""
    return plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=512, lowering_semantics=plgpu.LoweringSemantics.Lane
    )


def _buffers(dtype: Any, shape: Shape) -> Buffers:
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    rows = (NUM_COMPUTE, ROWS, shape.head_size)
    keys = (NUM_SLOTS, KEY_TILE, shape.head_size)
    return Buffers(
        q=plgpu.SMEM(rows, dtype, transforms=swizzled),
        out=plgpu.SMEM(rows, dtype, transforms=swizzled),
        rows=plgpu.SMEM(rows, dtype),
        lse=plgpu.SMEM(rows[:2], jnp.float32),
        k=plgpu.SMEM(keys, dtype, transforms=swizzled),
        v=plgpu.SMEM(keys, dtype, transforms=swizzled),
    )


def _barriers() -> Barriers:
    both = partial(plgpu.Barrier, num_arrivals=NUM_COMPUTE)
    return Barriers(
        q=plgpu.Barrier(num_barriers=NUM_COMPUTE),
        self_part=plgpu.Barrier(num_arrivals=2, num_barriers=NUM_COMPUTE),  # two copies
        k=plgpu.Barrier(num_barriers=NUM_SLOTS),
        v=plgpu.Barrier(num_barriers=NUM_SLOTS),
        q_free=both(),
        out_free=both(),
        k_free=both(num_barriers=NUM_SLOTS),
        v_free=both(num_barriers=NUM_SLOTS),
        turn=both(),
        cleaned=plgpu.Barrier(num_barriers=NUM_SLOTS),
    )


def _kernel(inputs: Inputs, out: Ref, buffers: Buffers, barriers: Barriers, shape: Shape) -> None:
    group = lax.axis_index("wg")

    @pl.when(group < NUM_COMPUTE)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        worker = ComputeWorker(inputs, out, buffers, barriers, shape, group)
        pl.when(group == 1)(worker.take_turns)  # half a step behind the other
        worker.end_turn()
        for_each_unit(inputs, shape, worker.compute)
        worker.wait_for_turn()
        pl.when(group == 0)(worker.take_turns)

    @pl.when(group == NUM_COMPUTE)
    def _copy() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        worker = CopyWorker(inputs, buffers, barriers, shape)
        worker.drain(*for_each_unit(inputs, shape, worker.load))
