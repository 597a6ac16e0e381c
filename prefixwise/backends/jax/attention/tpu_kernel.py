"""The attention kernel for TPUs: one program that goes through the tiles of a batch, one after the other.

A tile is up to `tile_tokens` neighbours that read the same tokens of one prefix, whichever segments they are of:

    window     queries, keys and values of its tokens come to VMEM while the tile before is computed, with those tokens
               before it that belong to its first segment, if that is a narrow one
    narrow     segments of at most `narrow` tokens over themselves, inside the window
    wide       longer segments: the tile's rows over the segment's blocks of KEY_TILE tokens up to themselves
    prefix     all rows over the prefix's key blocks, which are copied from their pages

A row's arithmetic follows from its segment and its prefix: keys are counted from the start of either, rows know nothing
of each other, and no sum is split. Its state is float32 in VMEM from the first key to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from prefixwise.backends.jax.attention.tpu_copies import KeyBlocks, OneHeadPages, Range, Ref, TokenCopy, tokens_of
from prefixwise.backends.jax.attention.tpu_softmax import (
    Block,
    State,
    States,
    TokenRows,
    accumulate,
    as_rows,
    kept_where,
    row_tokens,
)
from prefixwise.forward.tiles import KEY_TILE, NARROW, PREFIX, WIDE

UNROLLED_HEADS = 8  # KV heads; with more of them they are a loop
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class KernelShape:
    """What the kernel is compiled for."""

    tile_tokens: int
    narrow: int
    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_all_heads(self) -> int:
        """Of queries, keys and values."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def window_tokens(self) -> int:
        """A tile's first token is the `narrow`-th; behind its last one there is room for a narrow segment."""
        return self.tile_tokens + 2 * self.narrow

    @property
    def rows(self) -> Range:
        """The tile's tokens in the window."""
        return pl.ds(self.narrow, self.tile_tokens)


class TileRefs(NamedTuple):
    """Of `Tiles`, all int32 in SMEM."""

    counts: Ref  # [3]
    narrow_start: Ref  # [T]
    narrow_len: Ref  # [T]
    wide_start: Ref  # [wide tiles]
    wide_len: Ref  # [wide tiles]
    wide_segment: Ref  # [wide tiles]
    prefix_start: Ref  # [T]
    prefix_len: Ref  # [T]
    prefix_read: Ref  # [T]
    prefix_list: Ref  # [T]
    key_tile_addresses: Ref  # [blocks]
    base: Ref  # [1]


class Scratch(NamedTuple):
    """VMEM and semaphores; `W` is the window's tokens, `P` at most 128 numbers of a head, of which there are parts."""

    window: Ref  # [2, W, N + 2 K, H] of the inputs' dtype
    heads: Ref  # [parts, N + 2 K, W, P] float32
    q: Ref  # [N, tile_tokens, H] of the inputs' dtype
    keys: Ref  # [K, KEY_TILE, H] of the inputs' dtype
    values: Ref  # [K, KEY_TILE, H] of the inputs' dtype
    out: Ref  # [parts, N, W, P] float32
    peak: Ref  # [1, N, W, 128] float32
    total: Ref  # [1, N, W, 128] float32
    result: Ref  # [2, tile_tokens, N, H] of the inputs' dtype
    window_semaphores: Ref  # [2]
    result_semaphores: Ref  # [2]


class Own(NamedTuple):
    """Which narrow and wide tiles a tile begins with."""

    narrow: jax.Array
    wide: jax.Array


@dataclass(frozen=True)
class Kernel:
    """One run over all tiles of a batch."""

    shape: KernelShape
    tiles: TileRefs
    qkv: Ref  # [T, N + 2 K, H]
    output: Ref  # [T, N, H]
    scratch: Scratch
    segment_blocks: KeyBlocks
    prefix_blocks: KeyBlocks | OneHeadPages

    def run(self) -> None:
        num_tiles = self.tiles.counts[PREFIX]
        first = Own(jnp.int32(0), jnp.int32(0))

        @pl.when(num_tiles > 0)
        def _() -> None:
            self._window_copy(jnp.int32(0), first).start()

        lax.fori_loop(0, num_tiles, self._tile, first)
        for age in (2, 1):
            self._wait_for_result(num_tiles - age)

    def _tile(self, tile: jax.Array, own: Own) -> Own:
        stop = self.tiles.prefix_start[tile] + self.tiles.prefix_len[tile]
        tiles = self.tiles
        narrow_end, next_narrow = _span(tiles.narrow_start, tiles.narrow_len, tiles.counts[NARROW], own.narrow, stop)
        wide_end, next_wide = _span(tiles.wide_start, tiles.wide_len, tiles.counts[WIDE], own.wide, stop)
        following = Own(next_narrow, next_wide)
        self._start_prefix_block(tile, jnp.int32(0))

        @pl.when(tile + 1 < tiles.counts[PREFIX])
        def _() -> None:
            self._window_copy(tile + 1, following).start()

        self._window_copy(tile, own).wait()
        self._unpack_window(tile)
        lax.fori_loop(own.narrow, narrow_end, lambda number, _: self._narrow(tile, number), None)
        lax.fori_loop(own.wide, wide_end, lambda number, _: self._wide(tile, number, wide_end), None)
        self._prefix(tile)
        self._store(tile)
        return following

    def _window_copy(self, tile: jax.Array, own: Own) -> TokenCopy:
        """A tile's tokens, and those before it of its first segment if that is narrow."""
        start, slot = self.tiles.prefix_start[tile], lax.rem(tile, 2)
        has_narrow = own.narrow < self.tiles.counts[NARROW]
        narrow_start = self.tiles.narrow_start[jnp.minimum(own.narrow, len(self.tiles.narrow_start) - 1)]
        first = jnp.where(has_narrow, jnp.minimum(narrow_start, start), start)
        return TokenCopy(
            tokens_of(self.qkv, first),
            tokens_of(self.scratch.window.at[slot], self.shape.narrow - (start - first)),
            self.scratch.window_semaphores.at[slot],
            start + self.tiles.prefix_len[tile] - first,
            min(self.shape.tile_tokens + self.shape.narrow, len(self.qkv)),
        )

    def _unpack_window(self, tile: jax.Array) -> None:
        """The window by heads, and all softmaxes empty."""
        by_head = jnp.swapaxes(self.scratch.window[lax.rem(tile, 2)], 0, 1)
        TokenRows(self.scratch.heads).store(0, pl.ds(0, self.shape.window_tokens), by_head.astype(jnp.float32))
        self.scratch.q[...] = by_head[
            : self.shape.num_heads, self.shape.narrow : self.shape.narrow + self.shape.tile_tokens
        ]
        self._states.clear()

    @property
    def _states(self) -> States:
        return States(*(TokenRows(ref) for ref in (self.scratch.out, self.scratch.peak, self.scratch.total)))

    def _narrow(self, tile: jax.Array, number: jax.Array) -> None:
        """One short segment over itself: of `narrow` tokens in every case, of which those behind its end are masked."""
        start, narrow, group = self.tiles.narrow_start[number], self.shape.narrow, self.shape.heads_per_kv
        tile_start = self.tiles.prefix_start[tile]
        in_window = jnp.minimum(self.tiles.narrow_len[number], tile_start + self.tiles.prefix_len[tile] - start)
        tokens = pl.ds(start - tile_start + narrow, narrow)
        key = lax.broadcasted_iota(jnp.int32, (group * narrow, narrow), 1)
        seen = (key <= row_tokens(group, narrow, narrow)) & (key < in_window)
        heads, states, dtype = TokenRows(self.scratch.heads), self._states, self.qkv.dtype

        def attend(kv_head: jax.Array | int) -> None:
            q = as_rows(heads.load(kv_head * group, group, tokens)).astype(dtype)
            keys = as_rows(heads.load(self.shape.num_heads + kv_head, 1, tokens)).astype(dtype)
            first_value = self.shape.num_heads + self.shape.num_kv_heads
            values = as_rows(heads.load(first_value + kv_head, 1, tokens))
            token = lax.broadcasted_iota(jnp.int32, values.shape, 0)
            values = jnp.where(token < in_window, values, 0.0).astype(dtype)
            before = states.load(kv_head * group, group, tokens)
            found = accumulate(State.empty(*q.shape), Block(q, keys, values), seen)
            states.store(kv_head * group, group, tokens, kept_where(is_real, found, before))

        def is_real(width: int) -> jax.Array:
            return row_tokens(group, narrow, width) < in_window

        self._for_each_kv_head(attend)

    def _wide(self, tile: jax.Array, number: jax.Array, end: jax.Array) -> None:
        """The tile's rows of one long segment, with the last of its wide tiles here, over all blocks up to that."""
        tiles = self.tiles
        segment = tiles.wide_segment[number]
        following = jnp.minimum(number + 1, len(tiles.wide_segment) - 1)
        is_last = (number + 1 == end) | (tiles.wide_segment[following] != segment)
        stop = tiles.wide_start[number] + tiles.wide_len[number]
        num_blocks = jnp.where(is_last, lax.div(tiles.wide_start[number] - segment, KEY_TILE) + 1, 0)

        def token(width: int) -> jax.Array:
            return tiles.prefix_start[tile] + row_tokens(self.shape.heads_per_kv, self.shape.tile_tokens, width)

        def is_here(width: int) -> jax.Array:
            return (token(width) >= segment) & (token(width) < stop)

        def start(block: jax.Array) -> None:
            first = segment + block * KEY_TILE
            for copy in self.segment_blocks.copies(block, first, stop - first):
                pl.when(block < num_blocks)(copy.start)

        def attend(block: jax.Array, _: None) -> None:
            start(block + 1)
            first = segment + block * KEY_TILE
            self._arrive(self.segment_blocks, block, first, stop - first)
            seen = first + self._key <= token(KEY_TILE)
            self._block(lambda old, new: kept_where(is_here, accumulate(old, new, seen, sees_some=False), old))

        start(jnp.int32(0))
        lax.fori_loop(0, num_blocks, attend, None)

    def _prefix(self, tile: jax.Array) -> None:
        """All rows over the prefix's blocks, of which the first is under way."""
        num_read = self.tiles.prefix_read[tile]
        num_whole = lax.div(num_read, KEY_TILE)

        def attend(block: jax.Array, _: None) -> None:
            self._start_prefix_block(tile, block + 1)
            self._arrive(self.prefix_blocks, block, self._address(tile, block), None)
            self._block(lambda old, new: accumulate(old, new, None))

        def attend_last(rest: jax.Array) -> None:
            self._arrive(self.prefix_blocks, num_whole, self._address(tile, num_whole), rest)
            self._block(lambda old, new: accumulate(old, new, self._key < rest))

        lax.fori_loop(0, num_whole, attend, None)
        rest = num_read - num_whole * KEY_TILE
        pl.when(rest > 0)(partial(attend_last, rest))

    @property
    def _key(self) -> jax.Array:
        """Of each of the tile's rows and keys [R, KEY_TILE] the key's place in its block."""
        return lax.broadcasted_iota(jnp.int32, (self.shape.heads_per_kv * self.shape.tile_tokens, KEY_TILE), 1)

    def _start_prefix_block(self, tile: jax.Array, block: jax.Array) -> None:
        rest = self.tiles.prefix_read[tile] - block * KEY_TILE

        @pl.when(rest > 0)
        def _() -> None:
            for copy in self.prefix_blocks.copies(block, self._address(tile, block), rest):
                copy.start()

    def _address(self, tile: jax.Array, block: jax.Array) -> jax.Array:
        address: jax.Array = self.tiles.key_tile_addresses[self.tiles.prefix_list[tile] + block]
        return self.tiles.base[0] + address

    def _arrive(
        self, blocks: KeyBlocks | OneHeadPages, block: jax.Array, address: jax.Array, count: jax.Array | None
    ) -> None:
        """`count`: of the tokens that are needed; None: all."""
        for copy in blocks.copies(block, address, jnp.int32(KEY_TILE) if count is None else count):
            copy.wait()
        blocks.unpack(block, count, self.scratch.keys, self.scratch.values)

    def _block(self, step: Callable[[State, Block], State]) -> None:
        """The keys and values that have arrived into all of the tile's rows."""
        group, states = self.shape.heads_per_kv, self._states

        def attend(kv_head: jax.Array | int) -> None:
            before = states.load(kv_head * group, group, self.shape.rows)
            q = as_rows(self.scratch.q[pl.ds(kv_head * group, group)])
            after = step(before, Block(q, self.scratch.keys[kv_head], self.scratch.values[kv_head]))
            states.store(kv_head * group, group, self.shape.rows, after)

        self._for_each_kv_head(attend)

    def _for_each_kv_head(self, attend: Callable[[jax.Array | int], None]) -> None:
        if self.shape.num_kv_heads <= UNROLLED_HEADS:
            for kv_head in range(self.shape.num_kv_heads):
                attend(kv_head)
        else:
            lax.fori_loop(0, self.shape.num_kv_heads, lambda kv_head, _: attend(kv_head), None)

    def _store(self, tile: jax.Array) -> None:
        """The tile's rows, divided, by tokens again; the copy goes on while the next tile is computed."""
        self._wait_for_result(tile - 2)
        out = self._states.out.load(0, self.shape.num_heads, self.shape.rows)
        total = self._states.total.load(0, self.shape.num_heads, self.shape.rows).sum(axis=2, keepdims=True)
        self.scratch.result[lax.rem(tile, 2)] = jnp.swapaxes((out / total).astype(self.qkv.dtype), 0, 1)
        self._result_copy(tile).start()

    def _wait_for_result(self, tile: jax.Array) -> None:
        @pl.when(tile >= 0)
        def _() -> None:
            self._result_copy(tile).wait()

    def _result_copy(self, tile: jax.Array) -> TokenCopy:
        slot = lax.rem(tile, 2)
        return TokenCopy(
            tokens_of(self.scratch.result.at[slot], 0),
            tokens_of(self.output, self.tiles.prefix_start[tile]),
            self.scratch.result_semaphores.at[slot],
            self.tiles.prefix_len[tile],
            min(self.shape.tile_tokens, len(self.output)),
        )


def _span(starts: Ref, lens: Ref, count: jax.Array, first: jax.Array, stop: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of own tiles from `first` on: behind the last one that begins before token `stop`, and the first that ends behind
    it, with which the next tile begins."""

    def start_of(number: jax.Array) -> jax.Array:
        return jnp.where(number < count, starts[jnp.minimum(number, len(starts) - 1)], INT32_MAX)

    def onwards(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[0] + 1, start_of(state[0] + 1)

    end, _ = lax.while_loop(lambda state: state[1] < stop, onwards, (first, start_of(first)))
    last = jnp.maximum(end - 1, 0)
    goes_on = (end > first) & (starts[last] + lens[last] > stop)
    return end, jnp.where(goes_on, last, end)
