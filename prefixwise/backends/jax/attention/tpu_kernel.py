"""The attention kernel for TPUs: one program that loops over the tiles of a batch.

A tile is up to `tile_tokens` neighbouring tokens, of any segments, that read the same tokens of one prefix:

    window     queries, keys and values of the tile's tokens are copied to VMEM while the tile before is computed. If
               the tile starts inside a narrow segment, the window includes that segment's earlier tokens
    narrow     self-attention of segments of at most `narrow` tokens, inside the window
    wide       self-attention of longer segments: the tile's rows over the segment's key tiles of KEY_TILE tokens
    prefix     prefix attention: all rows over the prefix's key tiles, which are copied from their pages

A row's arithmetic follows from its segment and its prefix: keys are counted from the start of either, rows are
independent, and no sum is split. Its state is float32 in VMEM from the first key to the last.
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

from prefixwise.backends.jax.attention.tpu_copies import KeyTiles, OneHeadPages, Range, Ref, TokenCopy, tokens_of
from prefixwise.backends.jax.attention.tpu_softmax import (
    KeyTile,
    State,
    States,
    TokenRows,
    accumulate,
    as_rows,
    row_tokens,
    select_rows,
)
from prefixwise.forward.tiles import KEY_TILE, NARROW, PREFIX, WIDE

UNROLLED_HEADS = 8  # KV heads; more than these run in a loop
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class KernelShape:
    """Sizes that are fixed when the kernel is compiled."""

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
        """Heads of queries, keys and values."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def window_tokens(self) -> int:
        """The tile starts at token `narrow` of the window; behind the tile is room for a narrow segment."""
        return self.tile_tokens + 2 * self.narrow

    @property
    def rows(self) -> Range:
        """The tile's tokens in the window."""
        return pl.ds(self.narrow, self.tile_tokens)


class TileRefs(NamedTuple):
    """Fields of `Tiles`, all int32 in SMEM."""

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
    key_tile_addresses: Ref  # [key tiles]
    base: Ref  # [1]


class Scratch(NamedTuple):
    """VMEM and semaphores; `W` tokens of the window, `P` at most 128 numbers of a head (larger heads have parts)."""

    window: Ref  # [2, W, N + 2 K, H] of the inputs' dtype
    heads: Ref  # [parts, N + 2 K, W, P] float32
    q: Ref  # [N, tile_tokens, H] of the inputs' dtype
    keys: Ref  # [K, KEY_TILE, H] of the inputs' dtype
    values: Ref  # [K, KEY_TILE, H] of the inputs' dtype
    out: Ref  # [parts, N, W, P] float32
    m_i: Ref  # [1, N, W, 128] float32
    l_i: Ref  # [1, N, W, 128] float32
    result: Ref  # [2, tile_tokens, N, H] of the inputs' dtype
    window_semaphores: Ref  # [2]
    result_semaphores: Ref  # [2]


class FirstTiles(NamedTuple):
    """The first narrow and the first wide tile of a tile."""

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
    segment_tiles: KeyTiles
    prefix_tiles: KeyTiles | OneHeadPages

    def run(self) -> None:
        num_tiles = self.tiles.counts[PREFIX]
        first = FirstTiles(jnp.int32(0), jnp.int32(0))

        @pl.when(num_tiles > 0)
        def _() -> None:
            self._window_copy(jnp.int32(0), first).start()

        lax.fori_loop(0, num_tiles, self._tile, first)
        for age in (2, 1):
            self._wait_for_result(num_tiles - age)

    def _tile(self, tile: jax.Array, first: FirstTiles) -> FirstTiles:
        stop = self.tiles.prefix_start[tile] + self.tiles.prefix_len[tile]
        tiles = self.tiles
        narrow_end, next_narrow = _span(tiles.narrow_start, tiles.narrow_len, tiles.counts[NARROW], first.narrow, stop)
        wide_end, next_wide = _span(tiles.wide_start, tiles.wide_len, tiles.counts[WIDE], first.wide, stop)
        following = FirstTiles(next_narrow, next_wide)
        self._start_prefix_tile(tile, jnp.int32(0))

        @pl.when(tile + 1 < tiles.counts[PREFIX])
        def _() -> None:
            self._window_copy(tile + 1, following).start()

        self._window_copy(tile, first).wait()
        self._unpack_window(tile)
        lax.fori_loop(first.narrow, narrow_end, lambda number, _: self._narrow(tile, number), None)
        lax.fori_loop(first.wide, wide_end, lambda number, _: self._wide(tile, number, wide_end), None)
        self._prefix(tile)
        self._store(tile)
        return following

    def _window_copy(self, tile: jax.Array, first_tiles: FirstTiles) -> TokenCopy:
        """The copy of a tile's tokens, and of the earlier tokens of its first segment if that is narrow."""
        start, slot = self.tiles.prefix_start[tile], lax.rem(tile, 2)
        has_narrow = first_tiles.narrow < self.tiles.counts[NARROW]
        narrow_start = self.tiles.narrow_start[jnp.minimum(first_tiles.narrow, len(self.tiles.narrow_start) - 1)]
        first = jnp.where(has_narrow, jnp.minimum(narrow_start, start), start)
        return TokenCopy(
            tokens_of(self.qkv, first),
            tokens_of(self.scratch.window.at[slot], self.shape.narrow - (start - first)),
            self.scratch.window_semaphores.at[slot],
            start + self.tiles.prefix_len[tile] - first,
            min(self.shape.tile_tokens + self.shape.narrow, len(self.qkv)),
        )

    def _unpack_window(self, tile: jax.Array) -> None:
        """Transpose the window to heads, and clear all softmax states."""
        by_head = jnp.swapaxes(self.scratch.window[lax.rem(tile, 2)], 0, 1)
        TokenRows(self.scratch.heads).store(0, pl.ds(0, self.shape.window_tokens), by_head.astype(jnp.float32))
        self.scratch.q[...] = by_head[
            : self.shape.num_heads, self.shape.narrow : self.shape.narrow + self.shape.tile_tokens
        ]
        self._states.clear()

    @property
    def _states(self) -> States:
        return States(*(TokenRows(ref) for ref in (self.scratch.out, self.scratch.m_i, self.scratch.l_i)))

    def _narrow(self, tile: jax.Array, number: jax.Array) -> None:
        """Self-attention of one short segment. It always computes `narrow` tokens, and masks those behind the end."""
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
            found = accumulate(State.empty(*q.shape), KeyTile(q, keys, values), seen)
            states.store(kv_head * group, group, tokens, select_rows(is_real, found, before))

        def is_real(width: int) -> jax.Array:
            return row_tokens(group, narrow, width) < in_window

        self._for_each_kv_head(attend)

    def _wide(self, tile: jax.Array, number: jax.Array, end: jax.Array) -> None:
        """Self-attention of the tile's rows of one long segment: over all key tiles up to its last wide tile here."""
        tiles = self.tiles
        segment = tiles.wide_segment[number]
        following = jnp.minimum(number + 1, len(tiles.wide_segment) - 1)
        is_last = (number + 1 == end) | (tiles.wide_segment[following] != segment)
        stop = tiles.wide_start[number] + tiles.wide_len[number]
        num_key_tiles = jnp.where(is_last, lax.div(tiles.wide_start[number] - segment, KEY_TILE) + 1, 0)

        def token(width: int) -> jax.Array:
            return tiles.prefix_start[tile] + row_tokens(self.shape.heads_per_kv, self.shape.tile_tokens, width)

        def is_here(width: int) -> jax.Array:
            return (token(width) >= segment) & (token(width) < stop)

        def start(key_tile: jax.Array) -> None:
            first = segment + key_tile * KEY_TILE
            for copy in self.segment_tiles.copies(key_tile, first, stop - first):
                pl.when(key_tile < num_key_tiles)(copy.start)

        def attend(key_tile: jax.Array, _: None) -> None:
            start(key_tile + 1)
            first = segment + key_tile * KEY_TILE
            self._arrive(self.segment_tiles, key_tile, first, stop - first)
            seen = first + self._key <= token(KEY_TILE)
            self._key_tile(lambda old, new: select_rows(is_here, accumulate(old, new, seen, sees_some=False), old))

        start(jnp.int32(0))
        lax.fori_loop(0, num_key_tiles, attend, None)

    def _prefix(self, tile: jax.Array) -> None:
        """Prefix attention of all rows. The copy of the first key tile has started."""
        num_read = self.tiles.prefix_read[tile]
        num_whole = lax.div(num_read, KEY_TILE)

        def attend(key_tile: jax.Array, _: None) -> None:
            self._start_prefix_tile(tile, key_tile + 1)
            self._arrive(self.prefix_tiles, key_tile, self._address(tile, key_tile), None)
            self._key_tile(lambda old, new: accumulate(old, new, None))

        def attend_last(rest: jax.Array) -> None:
            self._arrive(self.prefix_tiles, num_whole, self._address(tile, num_whole), rest)
            self._key_tile(lambda old, new: accumulate(old, new, self._key < rest))

        lax.fori_loop(0, num_whole, attend, None)
        rest = num_read - num_whole * KEY_TILE
        pl.when(rest > 0)(partial(attend_last, rest))

    @property
    def _key(self) -> jax.Array:
        """[R, KEY_TILE]: the index of each key in its tile."""
        return lax.broadcasted_iota(jnp.int32, (self.shape.heads_per_kv * self.shape.tile_tokens, KEY_TILE), 1)

    def _start_prefix_tile(self, tile: jax.Array, key_tile: jax.Array) -> None:
        rest = self.tiles.prefix_read[tile] - key_tile * KEY_TILE

        @pl.when(rest > 0)
        def _() -> None:
            for copy in self.prefix_tiles.copies(key_tile, self._address(tile, key_tile), rest):
                copy.start()

    def _address(self, tile: jax.Array, key_tile: jax.Array) -> jax.Array:
        address: jax.Array = self.tiles.key_tile_addresses[self.tiles.prefix_list[tile] + key_tile]
        return self.tiles.base[0] + address

    def _arrive(
        self, key_tiles: KeyTiles | OneHeadPages, key_tile: jax.Array, address: jax.Array, count: jax.Array | None
    ) -> None:
        """Wait for a key tile and unpack it. `count`: the tokens that are needed; None: all."""
        for copy in key_tiles.copies(key_tile, address, jnp.int32(KEY_TILE) if count is None else count):
            copy.wait()
        key_tiles.unpack(key_tile, count, self.scratch.keys, self.scratch.values)

    def _key_tile(self, step: Callable[[State, KeyTile], State]) -> None:
        """The key tile that has arrived into the states of all of the tile's rows."""
        group, states = self.shape.heads_per_kv, self._states

        def attend(kv_head: jax.Array | int) -> None:
            before = states.load(kv_head * group, group, self.shape.rows)
            q = as_rows(self.scratch.q[pl.ds(kv_head * group, group)])
            after = step(before, KeyTile(q, self.scratch.keys[kv_head], self.scratch.values[kv_head]))
            states.store(kv_head * group, group, self.shape.rows, after)

        self._for_each_kv_head(attend)

    def _for_each_kv_head(self, attend: Callable[[jax.Array | int], None]) -> None:
        if self.shape.num_kv_heads <= UNROLLED_HEADS:
            for kv_head in range(self.shape.num_kv_heads):
                attend(kv_head)
        else:
            lax.fori_loop(0, self.shape.num_kv_heads, lambda kv_head, _: attend(kv_head), None)

    def _store(self, tile: jax.Array) -> None:
        """Normalise the tile's rows, transpose them to tokens, and start their copy to HBM."""
        self._wait_for_result(tile - 2)
        out = self._states.out.load(0, self.shape.num_heads, self.shape.rows)
        l_i = self._states.l_i.load(0, self.shape.num_heads, self.shape.rows).sum(axis=2, keepdims=True)
        self.scratch.result[lax.rem(tile, 2)] = jnp.swapaxes((out / l_i).astype(self.qkv.dtype), 0, 1)
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
    """Of narrow or wide tiles from `first` on: the end of those that start before token `stop`, and the first one that
    ends behind it, with which the next tile begins."""

    def start_of(number: jax.Array) -> jax.Array:
        return jnp.where(number < count, starts[jnp.minimum(number, len(starts) - 1)], INT32_MAX)

    def onwards(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[0] + 1, start_of(state[0] + 1)

    end, _ = lax.while_loop(lambda state: state[1] < stop, onwards, (first, start_of(first)))
    last = jnp.maximum(end - 1, 0)
    goes_on = (end > first) & (starts[last] + lens[last] > stop)
    return end, jnp.where(goes_on, last, end)
