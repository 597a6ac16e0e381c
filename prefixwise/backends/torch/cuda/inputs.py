"""A forward's integers: the arrays that the device needs of a batch, packed into one buffer, and their upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from prefixwise.contract.ragged import Int32Array, Int64Array
from prefixwise.forward.batch import ForwardBatch
from prefixwise.forward.kv_pages import cache_slots
from prefixwise.forward.tiles import Packing, Tiles, TileSizes, cut_scored_tiles, cut_tiles, tile_capacities

Item = TypeVar("Item")

SCORED, SCORED_ROWS = 3, 4  # indices in `TileArrays.counts`, behind those of `forward/tiles.py`
_NUM_BUFFERS = 4  # forwards whose copies may be queued before the host has to wait


@dataclass(frozen=True)
class ProgramSpec:
    """What a program computes. Batches with equal specs share a program."""

    num_tokens: int
    reads: Literal["batch", "cache"]  # where prefixes are read; with "cache", segments may also be cached
    scores: bool  # does it compute the hidden states of scored tokens?
    is_embedded: bool = False  # are the embeddings in place before it runs, as some of them are overridden?
    has_lora: bool = False  # do some tokens have LoRA adapters?

    @property
    def title(self) -> str:
        kinds = {"batch": "sequences", "cache": "extend" if self.scores else "prefill"}
        return f"{kinds[self.reads]}, {self.num_tokens} tokens{', with LoRA' if self.has_lora else ''}"


class TileArrays(NamedTuple, Generic[Item]):
    """The attention tiles of `forward/tiles.py`, none narrow; of each kind the first `counts[kind]` are used."""

    counts: Item  # [5]: narrow, wide, prefix, scored; and scored tokens, with padding
    wide_start: Item
    wide_len: Item
    wide_segment: Item
    prefix_start: Item
    prefix_len: Item
    prefix_read: Item
    prefix_list: Item  # where in `key_tile_addresses` the key tiles of the tile's prefix begin
    key_tile_addresses: Item
    scored_start: Item  # as `prefix_*`, for the scored tokens, one behind the other
    scored_len: Item
    scored_read: Item
    scored_list: Item


_OF_ALL_TOKENS = TileArrays._fields[1:-4]


class ForwardInputs(NamedTuple, Generic[Item]):
    """Arrays of int32, or a tuple of their lengths."""

    token_ids: Item  # [T]
    positions: Item  # [T]
    cache_slots: Item  # [T]: the token's slot in the KV cache, NOT_CACHED for most
    score_tokens: Item  # [T]
    lora_slots: Item  # [T]: the slot of the token's LoRA adapter; 0: none
    tiles: TileArrays[Item]


def capacities(spec: ProgramSpec, sizes: TileSizes, max_kv_blocks: int) -> ForwardInputs[int]:
    """The lengths of all arrays of a program's input."""
    num_tokens, reads_cache = spec.num_tokens, spec.reads == "cache"
    # In the batch every KV block has tokens of its own, so there are at most as many blocks as tokens.
    of_tiles = tile_capacities(num_tokens, sizes, max_kv_blocks if reads_cache else num_tokens)
    return ForwardInputs(
        token_ids=num_tokens,
        positions=num_tokens,
        cache_slots=num_tokens * reads_cache,
        score_tokens=num_tokens * spec.scores,
        lora_slots=num_tokens * spec.has_lora,
        tiles=TileArrays(5, *_of_all_tokens(of_tiles), *[num_tokens * spec.scores] * 4),
    )


def host_inputs(
    batch: ForwardBatch,
    spec: ProgramSpec,
    sizes: TileSizes,
    prefix_addresses: Sequence[Int64Array],
    new_pages: Mapping[int, int],
    num_score_rows: int = 0,
) -> ForwardInputs[Int32Array]:
    """The arrays. `prefix_addresses`: those of the key tiles of every prefix; `new_pages`: of new segments;
    `num_score_rows`: scored tokens with padding, at least."""
    nothing = np.zeros(0, np.int32)
    tiles = cut_tiles(batch, sizes, prefix_addresses)
    scored: Sequence[Int32Array] = [nothing] * 4
    if spec.scores and len(batch.score_tokens):
        scored = [*cut_scored_tiles(batch, sizes, prefix_addresses)]
    num_rows = max(num_score_rows, len(batch.score_tokens))
    counts = np.array([*tiles.counts, len(scored[0]), num_rows], np.int32)
    return ForwardInputs(
        token_ids=_filled(batch.token_ids, spec.num_tokens),
        positions=_filled(batch.positions, spec.num_tokens),
        cache_slots=_cache_slots(batch, spec, new_pages),
        score_tokens=_filled(batch.score_tokens, spec.num_tokens) if spec.scores else nothing,
        lora_slots=nothing if batch.lora_slots is None else _filled(batch.lora_slots, spec.num_tokens),
        tiles=TileArrays(counts, *_of_all_tokens(tiles), *scored),
    )


def _of_all_tokens(tiles: Tiles[Item]) -> list[Item]:
    """The arrays that the kernels read."""
    return [getattr(tiles, name) for name in _OF_ALL_TOKENS]


def _filled(array: Int32Array | Int64Array, length: int) -> Int32Array:
    """Padded with zeros: padding is tokens, too."""
    filled = np.zeros(length, np.int32)
    filled[: len(array)] = array
    return filled


def _cache_slots(batch: ForwardBatch, spec: ProgramSpec, new_pages: Mapping[int, int]) -> Int32Array:
    if spec.reads != "cache":
        return np.zeros(0, np.int32)
    return cache_slots(batch, list(new_pages), list(new_pages.values()), spec.num_tokens)


def flat(inputs: ForwardInputs[Item]) -> list[Item]:
    """All arrays, in the order in which they are packed."""
    return [*inputs[:-1], *inputs.tiles]


def packing(lens: ForwardInputs[int]) -> Packing:
    """Where the arrays lie in a buffer."""
    return Packing(flat(lens))


def unpack(packing: Packing, packed: Any) -> ForwardInputs[Any]:
    """The arrays of a buffer."""
    arrays = packing.unpack(packed)
    head = dict(zip(ForwardInputs._fields[:-1], arrays, strict=False))
    return ForwardInputs(**head, tiles=TileArrays(*arrays[len(head) :]))


class Uploads:
    """Copies from pinned buffers, used in rotation, to one device buffer whose address stays the same.

    The device buffer is overwritten in the stream's order, after the previous forward has read it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(_NUM_BUFFERS)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied: list[torch.cuda.Event] = []
        if is_cuda:
            self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._next = 0

    def send(self, size: int, fill: Callable[[Int32Array], None]) -> None:
        """Let `fill` write the first `size` numbers, and queue their copy to the device."""
        number = self._next
        self._next = (number + 1) % _NUM_BUFFERS
        if self._copied:
            self._copied[number].synchronize()  # at once for an event that was never recorded
        fill(self._arrays[number][:size])
        self.on_device[:size].copy_(self._buffers[number][:size], non_blocking=True)
        if self._copied:
            self._copied[number].record(torch.cuda.current_stream(self.on_device.device))
