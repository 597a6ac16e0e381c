"""A batch on its way to the devices: split between data shards, its integers packed into one buffer per shard.

A transfer costs the same for 4 bytes and for 400 kilobytes, so all arrays of a forward travel as one. The program
slices them again at offsets that are known when it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from prefixwise.contract.ragged import Int32Array, Int64Array
from prefixwise.forward.batch import ForwardBatch, Layout, Prefix
from prefixwise.forward.kv_pages import cache_slots
from prefixwise.forward.tiles import HostTiles, Packing, Tiles, TileSizes, tile_capacities

Item = TypeVar("Item")

_LEAST_OVERRIDES = 64  # overridden tokens of a program


@dataclass(frozen=True)
class ProgramSpec:
    """What a compiled trunk can do. Batches that agree in this share a program."""

    num_tokens: int  # capacity of one data shard
    reads: Literal["batch", "kv_cache"]  # where prefixes are
    writes_cache: bool  # some segments are cached first, and read from the KV cache; others may be scored
    dense_columns: int = 0  # longest sequence of a dense mask; 0: no dense mask
    is_embedded: bool = False  # another program has computed the embeddings, as some of them are overridden
    has_lora: bool = False  # some tokens have LoRA adapters

    def with_mask(self, columns: int) -> ProgramSpec:
        return replace(self, dense_columns=columns)

    @property
    def kind(self) -> Literal["sequences", "prefill", "extend"]:
        if self.reads == "batch":
            return "sequences"
        return "prefill" if self.writes_cache else "extend"

    @property
    def title(self) -> str:
        masked = f", dense mask of {self.dense_columns} columns" if self.dense_columns else ""
        embedded = ", behind overridden embeddings" if self.is_embedded else ""
        adapted = ", with LoRA" if self.has_lora else ""
        return f"{self.kind}, {self.num_tokens} tokens{masked}{embedded}{adapted}"


class ForwardInputs(NamedTuple, Generic[Item]):
    """Arrays of int32 (or a tuple of their lengths; arrays that a program does not need have length 0)."""

    num_token_tiles: Item  # [1]
    num_sequences: Item  # [1], of a dense mask
    token_ids: Item  # [T]
    positions: Item  # [T]
    cache_slots: Item  # [T]: slot in the KV cache, NOT_CACHED for most tokens
    token_sequence: Item  # [T]: first token of the sequence, of a dense mask
    sequence_starts: Item  # [T + 1]
    lora_slots: Item  # [T]: the slot of the token's LoRA adapter; 0: none
    tiles: Tiles[Item]


def split_batch(batch: ForwardBatch, num_shards: int) -> list[tuple[ForwardBatch, Int64Array]]:
    """Per data shard its part of the batch, and which of the batch's scored rows it computes.

    A batch is cut between segments (extend) or sequences, so that the shards have about as many tokens each. Cached
    segments must be in every copy's KV cache, so a batch that caches runs on all shards, and the first one's scores are
    taken.
    """
    all_rows = np.arange(len(batch.score_tokens))
    if num_shards == 1:
        return [(batch, all_rows)]
    if batch.cache_segments:
        return [(batch, all_rows), *[(batch, all_rows[:0])] * (num_shards - 1)]
    edges = batch.segment_starts if batch.layout is Layout.EXTEND else batch.sequence_starts
    targets = np.arange(num_shards + 1) * batch.num_tokens / num_shards
    cuts = edges[np.abs(edges[:, None] - targets).argmin(0)]
    return [_take_tokens(batch, int(start), int(stop)) for start, stop in pairwise(cuts)]


def _take_tokens(batch: ForwardBatch, start: int, stop: int) -> tuple[ForwardBatch, Int64Array]:
    first, last = np.searchsorted(batch.segment_starts, [start, stop])
    rows = np.flatnonzero((batch.score_tokens >= start) & (batch.score_tokens < stop))
    sequence_starts = batch.sequence_starts[(batch.sequence_starts >= start) & (batch.sequence_starts <= stop)] - start
    part = replace(
        batch,
        token_ids=batch.token_ids[start:stop],
        positions=batch.positions[start:stop],
        segment_starts=batch.segment_starts[first : last + 1] - start,
        prefix_index=batch.prefix_index[first:last],
        prefix_lens=batch.prefix_lens[first:last],
        # Prefixes of other shards stay in the list, so that the indices hold; nothing here reads them.
        prefixes=tuple(_shift(prefix, int(first)) for prefix in batch.prefixes),
        sequence_starts=sequence_starts if len(sequence_starts) > 1 else np.array([0, stop - start]),
        score_tokens=batch.score_tokens[rows] - start,
        label_ids=batch.label_ids[rows],
        embed_overrides=None if batch.embed_overrides is None else batch.embed_overrides.between(start, stop),
        lora_slots=None if batch.lora_slots is None else batch.lora_slots[start:stop],
    )
    return part, rows


def _shift(prefix: Prefix, num_segments: int) -> Prefix:
    return prefix if prefix.segment is None else prefix._replace(segment=prefix.segment - num_segments)


def override_inputs(
    parts: Sequence[ForwardBatch], num_tokens: int, dtype: DTypeLike
) -> tuple[Int32Array, NDArray[Any]]:
    """Per data shard its tokens and the overridden ones of them [dp, T + E], and the rows for these [dp, E, D].

    E is a power of four, so that few programs serve all batches, and at most T. Padding is token T, which is none.
    """
    found = [part.embed_overrides for part in parts]
    most, size = max(0 if each is None else len(each.tokens) for each in found), _LEAST_OVERRIDES
    while size < most:
        size *= 4
    size = min(size, num_tokens)
    width = next(each.vectors.shape[1] for each in found if each is not None)
    tokens = np.full((len(parts), num_tokens + size), num_tokens, np.int32)
    rows = np.zeros((len(parts), size, width), dtype)
    for number, (part, overrides) in enumerate(zip(parts, found, strict=True)):
        tokens[number, : part.num_tokens] = part.token_ids
        tokens[number, part.num_tokens : num_tokens] = 0
        if overrides is not None:
            count = len(overrides.tokens)
            tokens[number, num_tokens : num_tokens + count] = overrides.tokens
            rows[number, :count] = overrides.vectors
    return tokens, rows


@lru_cache  # the same for every forward of a program
def capacities(spec: ProgramSpec, sizes: TileSizes, max_kv_blocks: int) -> ForwardInputs[int]:
    """The lengths of all arrays of a program's input."""
    num_tokens = spec.num_tokens
    is_dense = spec.dense_columns > 0
    return ForwardInputs(
        num_token_tiles=1,
        num_sequences=1,
        token_ids=num_tokens,
        positions=num_tokens,
        cache_slots=num_tokens * spec.writes_cache,
        token_sequence=num_tokens * is_dense,
        sequence_starts=(num_tokens + 1) * is_dense,
        lora_slots=num_tokens * spec.has_lora,
        # Key tiles of prefixes in the batch hold tokens of the batch, so there are no more tiles than tokens.
        tiles=tile_capacities(num_tokens, sizes, max_kv_blocks if spec.reads == "kv_cache" else num_tokens),
    )


def host_inputs(
    batch: ForwardBatch, spec: ProgramSpec, tiles: HostTiles, new_pages: Sequence[int], tile_rows: int
) -> ForwardInputs[Int32Array]:
    """The used parts of all arrays.

    `new_pages`: addresses for the segments to cache; `tile_rows`: rows of a tile of tokens.
    """
    nothing = np.zeros(0, np.int32)
    is_dense = spec.dense_columns > 0
    slots = cache_slots(batch, batch.cache_segments, new_pages, spec.num_tokens) if spec.writes_cache else nothing
    return ForwardInputs(
        num_token_tiles=np.array([-(-batch.num_tokens // tile_rows)], np.int32),
        num_sequences=np.array([len(batch.sequence_starts) - 1], np.int32),
        token_ids=batch.token_ids,
        positions=batch.positions,
        cache_slots=slots,
        token_sequence=token_sequences(batch) if is_dense else nothing,
        sequence_starts=batch.sequence_starts.astype(np.int32) if is_dense else nothing,
        lora_slots=nothing if batch.lora_slots is None or not spec.has_lora else batch.lora_slots,
        tiles=tiles,
    )


def token_sequences(batch: ForwardBatch) -> Int32Array:
    """[T]: the first token of every token's sequence."""
    return np.repeat(batch.sequence_starts[:-1], np.diff(batch.sequence_starts)).astype(np.int32)


def pack(shards: Sequence[ForwardInputs[Int32Array]], lens: ForwardInputs[int]) -> Int32Array:
    """[shards, all arrays one behind the other]; unused entries are zero."""
    packing = _packing(lens)
    packed = np.zeros((len(shards), packing.size), np.int32)
    for row, shard in zip(packed, shards, strict=True):
        packing.pack(_flat(shard), row)
    return packed


def packed_size(lens: ForwardInputs[int]) -> int:
    """Numbers in a row of `pack`."""
    return _packing(lens).size


def unpack(packed: Any, lens: ForwardInputs[int]) -> ForwardInputs[Any]:
    """One row of `pack`, on the device, to its arrays."""
    return _unflat(_packing(lens).unpack(packed))


@lru_cache  # as `capacities`
def _packing(lens: ForwardInputs[int]) -> Packing:
    return Packing(_flat(lens))


def _flat(inputs: ForwardInputs[Item]) -> list[Item]:
    return [*inputs[:-1], *inputs.tiles]


def _unflat(items: Sequence[Item]) -> ForwardInputs[Item]:
    """The inverse of `_flat`."""
    fields = dict(zip(ForwardInputs._fields[:-1], items, strict=False))
    return ForwardInputs(**fields, tiles=Tiles(*items[len(fields) :]))
