"""Prefix attention on Hopper: the warp that loads, and the visits of a program. See `hopper.py`.

`C` keys of a key tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


def jit(function: Callable[..., Any]) -> Any:
    """`gluon.jit`, with a type."""
    return gluon.jit(function)


@jit
def num_visits_of(num_work: gl.tensor) -> gl.tensor:
    """Of this program."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    num_rounds = num_work // num_programs
    if num_rounds % 2 == 1:
        program = num_programs - 1 - program
    return num_rounds + (program < num_work % num_programs).to(gl.int32)


@jit
def work_of(visit: gl.tensor, num_work: gl.tensor) -> gl.tensor:
    """The tile and head of a visit, as one number.

    Tiles with long prefixes come last where KV blocks of one prefix read each other. So tiles are taken from the end,
    and every second round in reverse, so that a program that had a long prefix gets a short one next.
    """
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if visit % 2 == 1:
        program = num_programs - 1 - program
    return gl.maximum(num_work - 1 - visit * num_programs - program, 0)


@jit
def place_of(step: gl.tensor, num_buffers: gl.constexpr) -> gl.tuple:
    """The buffer of a step, and the parity of its barrier's phase."""
    return step % num_buffers, step // num_buffers % 2


@jit
def load_visits(
    tiles: gl.tuple,  # counts, starts, lens, reads, lists, addresses
    descriptors: gl.tuple,  # queries, outputs, keys, values
    buffers: gl.tuple,  # queries [2 visits x 2 halves, *row_box], outputs [2 halves, *row_box]; keys, values; not read
    barriers: gl.tuple,  # queries are loaded, are consumed; outputs, keys and values likewise
    first_key_head: gl.constexpr,
    first_value_head: gl.constexpr,
    kind: gl.constexpr,
    width: gl.constexpr,
    page_size: gl.constexpr,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    padded_group: gl.constexpr,
    head_size: gl.constexpr,
) -> None:
    """Load all that the two groups need, in their order: values one key tile behind the keys."""
    counts, starts, _, reads, lists, addresses = tiles
    queries, outputs, keys, values = descriptors
    query_buffers, output_buffers, key_buffers, value_buffers, _ = buffers
    queries_ready, queries_free, outputs_ready, outputs_free, keys_ready, keys_free, values_ready, values_free = (
        barriers
    )
    num_buffers: gl.constexpr = key_buffers.shape[0]
    num_keys: gl.constexpr = key_buffers.shape[1]
    per_page: gl.constexpr = page_size // num_keys
    # The second half of the rows: the next tokens, or, where a token has more heads than that, the next heads.
    next_token = width // 2
    next_head = padded_group - query_buffers.shape[2]
    num_work = gl.load(counts + kind) * num_kv_heads
    step = 0
    value_row, value_column = 0, 0  # of the key tile before
    for visit in range(num_visits_of(num_work)):
        work = work_of(visit, num_work)
        tile, kv_head = work // num_kv_heads, work % num_kv_heads
        start = gl.load(starts + tile)
        num_key_tiles = (gl.load(reads + tile) + num_keys - 1) // num_keys
        list_at = addresses + gl.load(lists + tile)
        turn, is_odd = place_of(visit, 2)
        mbarrier.wait(queries_free.index(turn), is_odd ^ 1)
        mbarrier.expect(queries_ready.index(turn), 2 * queries.block_type.nbytes)
        for half in gl.static_range(2):
            place = [start + half * next_token, kv_head * group + half * next_head, 0]
            tma.async_copy_global_to_shared(
                queries, place, queries_ready.index(turn), query_buffers.index(2 * turn + half)
            )
        for number in range(num_key_tiles):
            key_tile = number - 1
            if number == 0:
                key_tile = num_key_tiles - 1
            row = gl.load(list_at + key_tile // per_page) + key_tile % per_page * num_keys
            buffer, is_odd = place_of(step, num_buffers)
            mbarrier.wait(keys_free.index(buffer), is_odd ^ 1)
            mbarrier.expect(keys_ready.index(buffer), keys.block_type.nbytes)
            column = (first_key_head + kv_head) * head_size
            tma.async_copy_global_to_shared(keys, [row, column], keys_ready.index(buffer), key_buffers.index(buffer))
            if step > 0:
                _load_values(values, value_row, value_column, step - 1, value_buffers, values_ready, values_free)
            if number == 0:
                mbarrier.wait(outputs_free, (visit + 1) % 2)
                mbarrier.expect(outputs_ready, 2 * outputs.block_type.nbytes)
                for half in gl.static_range(2):
                    place = [start + half * next_token, kv_head * group + half * next_head, 0]
                    tma.async_copy_global_to_shared(outputs, place, outputs_ready, output_buffers.index(half))
            value_row, value_column = row, (first_value_head + kv_head) * head_size
            step += 1
    if step > 0:
        _load_values(values, value_row, value_column, step - 1, value_buffers, values_ready, values_free)


@jit
def _load_values(
    values: tma.tensor_descriptor,
    row: gl.tensor,
    column: gl.tensor,
    step: gl.tensor,
    value_buffers: gl.shared_memory_descriptor,
    values_ready: gl.shared_memory_descriptor,
    values_free: gl.shared_memory_descriptor,
) -> None:
    """Values of a step, as soon as there is a buffer for them."""
    num_buffers: gl.constexpr = value_buffers.shape[0]
    buffer, is_odd = place_of(step, num_buffers)
    mbarrier.wait(values_free.index(buffer), is_odd ^ 1)
    mbarrier.expect(values_ready.index(buffer), values.block_type.nbytes)
    tma.async_copy_global_to_shared(values, [row, column], values_ready.index(buffer), value_buffers.index(buffer))
