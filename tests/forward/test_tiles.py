from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.contract.ragged import Int64Array, ranges
from prefixwise.forward.batch import ForwardBatch
from prefixwise.forward.tiles import (
    ALIGNMENT,
    KEY_TILE,
    NARROW,
    PREFIX,
    WIDE,
    HostTiles,
    Packing,
    TileSizes,
    cut_scored_tiles,
    cut_tiles,
    tile_capacities,
)
from tests.attention_cases import AttentionCase, make_batch

SIZES = (TileSizes(32, 128, 64), TileSizes(32, 64, 128), TileSizes(32, 16, 16), TileSizes(4, 3, 5))
ALIGNED_SIZES = (TileSizes(32, 64, 64, 8), TileSizes(32, 64, 128, 8), TileSizes(4, 3, 12, 4), TileSizes(4, 3, 8, 8))


@dataclass(frozen=True)
class Cut:
    """A batch, how it is to be cut, and its tiles."""

    case: AttentionCase
    sizes: TileSizes
    padding: int

    @property
    def batch(self) -> ForwardBatch:
        return make_batch(self.case)

    @property
    def addresses(self) -> list[Int64Array]:
        """Addresses that differ between prefixes."""
        lens = self.case.cached_prefix_lens
        return [1000 * (p + 1) + np.arange(-(-length // KEY_TILE)) for p, length in enumerate(lens)]

    @property
    def tiles(self) -> HostTiles:
        return cut_tiles(self.batch, self.sizes, self.addresses, self.padding)


@st.composite
def cuts(draw: st.DrawFn, sizes: Sequence[TileSizes] = (*SIZES, *ALIGNED_SIZES)) -> Cut:
    prefix_lens = draw(st.lists(st.integers(1, 400), max_size=3))
    lens = draw(st.lists(st.integers(1, 40) | st.integers(1, 300), max_size=8))
    index = [draw(st.integers(-1, len(prefix_lens) - 1)) for _ in lens]
    reads = [draw(st.integers(0, prefix_lens[p])) if p >= 0 else 0 for p in index]
    case = AttentionCase("drawn", tuple(lens), tuple(index), tuple(reads), tuple(prefix_lens))
    return Cut(case, draw(st.sampled_from(sizes)), draw(st.integers(0, 100)))


def self_attention_tiles(tiles: HostTiles) -> set[tuple[int, int, int]]:
    """Start, length and start of the segment of every tile of self-attention."""
    narrow = zip(tiles.narrow_start, tiles.narrow_len, tiles.narrow_start, strict=True)
    wide = zip(tiles.wide_start, tiles.wide_len, tiles.wide_segment, strict=True)
    return {(int(start), int(length), int(segment)) for start, length, segment in (*narrow, *wide)}


@given(cuts())
def test_self_attention_tiles_cover_every_token_once(cut: Cut) -> None:
    tiles, num_tokens = cut.tiles, cut.batch.num_tokens
    found = sorted(self_attention_tiles(tiles))
    covered = [token for start, length, _ in found for token in range(start, start + length)]
    assert covered == list(range(num_tokens + cut.padding))
    for start, length, segment in found:
        if start < num_tokens:
            assert tiles.token_segment[start : start + length].tolist() == [segment] * length


@given(cuts())
def test_self_attention_tiles_are_counted_from_the_start_of_their_segment(cut: Cut) -> None:
    """A narrow tile is a whole segment; wide ones are full but for the last."""
    tiles, sizes = cut.tiles, cut.sizes
    lens = dict(zip(cut.batch.segment_starts.tolist(), cut.case.segment_lens, strict=False))
    for start, length in zip(tiles.narrow_start.tolist(), tiles.narrow_len.tolist(), strict=True):
        assert 0 < length <= sizes.narrow
        if start < cut.batch.num_tokens:
            assert length == lens[start]
    for start, length, segment in zip(tiles.wide_start, tiles.wide_len, tiles.wide_segment, strict=True):
        assert (start - segment) % sizes.wide == 0
        assert length == min(sizes.wide, segment + lens[int(segment)] - start) > 0
        assert lens[int(segment)] > sizes.narrow


@given(cuts(SIZES))
def test_prefix_tiles_cover_every_token_that_reads_a_prefix_once(cut: Cut) -> None:
    tiles, batch = cut.tiles, cut.batch
    lens = np.diff(batch.segment_starts)
    token_prefix, token_reads = (np.repeat(each, lens) for each in (batch.prefix_index, batch.prefix_lens))
    starts, widths = tiles.prefix_start.astype(np.int64), tiles.prefix_len.astype(np.int64)
    assert ranges(starts, widths).tolist() == np.flatnonzero(token_reads > 0).tolist()
    for number, (start, width) in enumerate(zip(starts, widths, strict=True)):
        tokens = slice(start, start + width)
        assert 0 < width <= cut.sizes.prefix
        assert len(set(token_prefix[tokens])) == 1, "neighbours share a tile where they read the same prefix"
        assert set(token_reads[tokens]) == {tiles.prefix_read[number]}


def prefix_tiles(tiles: HostTiles) -> list[tuple[int, int]]:
    """Start and length of every tile of the prefix part."""
    return list(zip(tiles.prefix_start.tolist(), tiles.prefix_len.tolist(), strict=True))


@given(cuts(ALIGNED_SIZES))
def test_aligned_prefix_tiles_cover_every_token_once(cut: Cut) -> None:
    """Those that read nothing, and padding, too."""
    covered = [token for start, width in prefix_tiles(cut.tiles) for token in range(start, start + width)]
    assert covered == list(range(cut.batch.num_tokens + cut.padding))


@given(cuts(ALIGNED_SIZES))
def test_an_aligned_prefix_tile_lies_in_the_window_that_begins_at_the_multiple_before_it(cut: Cut) -> None:
    alignment, width = cut.sizes.alignment, cut.sizes.prefix
    for start, length in prefix_tiles(cut.tiles):
        window = start // alignment * alignment
        assert window <= start < start + length <= window + width


@given(cuts(ALIGNED_SIZES))
def test_the_tokens_of_an_aligned_prefix_tile_read_the_same(cut: Cut) -> None:
    batch = cut.batch
    token_reads = np.append(np.repeat(batch.prefix_lens, np.diff(batch.segment_starts)), [0] * cut.padding)
    token_prefix = np.append(np.repeat(batch.prefix_index, np.diff(batch.segment_starts)), [-1] * cut.padding)
    token_prefix[token_reads == 0] = -1  # of a prefix that is not read nothing matters
    for start, length in prefix_tiles(cut.tiles):
        tokens = slice(start, start + length)
        assert len(set(zip(token_prefix[tokens], token_reads[tokens], strict=True))) == 1


@given(cuts())
def test_every_prefix_tile_finds_what_its_tokens_read(cut: Cut) -> None:
    tiles, num_tokens = cut.tiles, cut.batch.num_tokens
    for number, (start, length) in enumerate(prefix_tiles(tiles)):
        tokens, num_read = slice(start, start + length), int(tiles.prefix_read[number])
        real = min(length, max(0, num_tokens - start))
        assert tiles.token_prefix_len[tokens].tolist() == [num_read] * real
        if real < length:
            assert num_read == 0, "padding reads nothing"
        if num_read:
            assert tiles.token_prefix_list[tokens].tolist() == [tiles.prefix_list[number]] * real


def test_aligned_windows_are_counted_from_the_multiple_before_a_run() -> None:
    """Two segments that read one prefix are one run of 110 tokens from token 5 on; seven of padding come behind it."""
    case = AttentionCase("two runs", (5, 100, 10), (0, 1, 1), (50, 200, 200), (50, 200))
    tiles = Cut(case, TileSizes(32, 64, 64, alignment=8), padding=7).tiles
    assert prefix_tiles(tiles) == [(0, 5), (5, 59), (64, 51), (115, 7)]
    assert tiles.prefix_read.tolist() == [50, 200, 200, 0]
    assert tiles.prefix_list.tolist()[:3] == [0, 1, 1]


@given(cuts())
def test_every_token_finds_the_key_tiles_of_its_prefix(cut: Cut) -> None:
    tiles, batch, addresses = cut.tiles, cut.batch, cut.addresses
    for segment, start in enumerate(batch.segment_starts[:-1]):
        prefix, length = int(batch.prefix_index[segment]), int(batch.prefix_lens[segment])
        assert tiles.token_prefix_len[start] == length
        num_key_tiles, first = -(-length // KEY_TILE), int(tiles.token_prefix_list[start])
        if num_key_tiles:
            assert np.array_equal(
                tiles.key_tile_addresses[first : first + num_key_tiles], addresses[prefix][:num_key_tiles]
            )


@given(cuts(), st.data())
def test_tiles_of_scored_tokens_have_what_these_read(cut: Cut, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, max(0, cut.batch.num_tokens - 1)), min_size=1, max_size=40))
    batch, tiles = replace(cut.batch, score_tokens=np.array(tokens)), cut.tiles
    if not batch.num_tokens:
        return
    found: dict[int, tuple[int, int]] = {}  # by row
    for start, length, read, key_tiles in cut_scored_tiles(batch, cut.sizes, cut.addresses).T.tolist():
        assert 0 < length <= cut.sizes.prefix
        assert not found.keys() & set(range(start, start + length))
        found |= dict.fromkeys(range(start, start + length), (read, key_tiles))
    expected = [(int(tiles.token_prefix_len[each]), int(tiles.token_prefix_list[each])) for each in tokens]
    assert found == {row: each for row, each in enumerate(expected) if each[0]}


@given(cuts())
def test_self_attention_tiles_of_a_segment_do_not_depend_on_its_neighbours(cut: Cut) -> None:
    whole = self_attention_tiles(cut.tiles)
    for length, start in zip(cut.case.segment_lens, cut.batch.segment_starts.tolist(), strict=False):
        lone = self_attention_tiles(cut_tiles(make_batch(AttentionCase("alone", (length,))), cut.sizes, []))
        assert {(start + first, width, start) for first, width, _ in lone} == {t for t in whole if t[2] == start}


@given(cuts())
def test_capacities_are_never_exceeded(cut: Cut) -> None:
    tiles, num_tokens = cut.tiles, cut.batch.num_tokens + cut.padding
    capacities = tile_capacities(num_tokens, cut.sizes, sum(map(len, cut.addresses)))
    assert all(len(used) <= room for used, room in zip(tiles, capacities, strict=True))
    kinds = {NARROW: tiles.narrow_start, WIDE: tiles.wide_start, PREFIX: tiles.prefix_start}
    assert tiles.counts.tolist() == [len(kinds[kind]) for kind in range(3)]
    assert all(array.dtype == np.int32 for array in tiles)


def test_the_most_wide_tiles_that_tokens_can_make() -> None:
    """Segments that just miss being narrow have one tile each, most of it empty."""
    for sizes in SIZES:
        batch = make_batch(AttentionCase("just wide", (sizes.narrow + 1,) * 20))
        used = int(cut_tiles(batch, sizes, []).counts[WIDE])
        assert 20 <= used <= tile_capacities(batch.num_tokens, sizes, 0).wide_start


def test_a_batch_without_segments() -> None:
    """As a copy of the model gets it when there are fewer rows than copies."""
    batch = make_batch(AttentionCase("nothing", (), cached_prefix_lens=(300,), sequence_starts=(0, 0)))
    for sizes, padding, counts in (
        (SIZES[0], 0, [0, 0, 0]),
        (SIZES[0], 64, [2, 0, 0]),
        (ALIGNED_SIZES[0], 0, [0, 0, 0]),
        (ALIGNED_SIZES[0], 65, [3, 0, 2]),
    ):
        tiles = cut_tiles(batch, sizes, [np.arange(3) * KEY_TILE], padding)
        assert tiles.counts.tolist() == counts
        assert len(tiles.token_segment) == len(tiles.token_prefix_len) == len(tiles.token_prefix_list) == 0


def test_arrays_of_tokens_that_nobody_reads_are_empty() -> None:
    batch = make_batch(
        AttentionCase("two items", (20, 40), prefix_index=(0, 0), prefix_lens=(300, 300), cached_prefix_lens=(300,))
    )
    with_tokens, without = (TileSizes(32, 64, 64, has_token_arrays=each) for each in (True, False))
    addresses = [np.arange(3) * KEY_TILE]
    expected, found = (cut_tiles(batch, sizes, addresses)._asdict() for sizes in (with_tokens, without))
    lens = tile_capacities(batch.num_tokens, without, 3)._asdict()
    for name, array in expected.items():
        is_of_tokens = name.startswith("token_")
        assert found[name].tolist() == ([] if is_of_tokens else array.tolist())
        assert (lens[name] == 0) == is_of_tokens


class TestPacking:
    def test_arrays_come_back_where_they_were_put(self) -> None:
        packing = Packing([5, 0, 33, 1])
        target = np.full(packing.size, -1, np.int32)
        arrays = [
            np.arange(3, dtype=np.int32),
            np.zeros(0, np.int32),
            np.arange(33, dtype=np.int32),
            np.ones(1, np.int32),
        ]
        packing.pack(arrays, target)
        found = packing.unpack(target)
        assert [len(each) for each in found] == [5, 0, 33, 1]
        for array, each in zip(arrays, found, strict=True):
            assert np.array_equal(each[: len(array)], array)
        assert found[0][3:].tolist() == [-1, -1], "unused entries are not changed"

    def test_every_array_begins_at_an_aligned_offset(self) -> None:
        packing = Packing([1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1])
        assert packing.size == 5 * ALIGNMENT
        numbers = np.arange(packing.size)
        assert all(each[0] % ALIGNMENT == 0 for each in packing.unpack(numbers))

    def test_an_array_beyond_its_capacity_is_refused(self) -> None:
        with pytest.raises(AssertionError, match="larger than its program"):
            Packing([2]).pack([np.zeros(3, np.int32)], np.zeros(32, np.int32))


@pytest.mark.parametrize(
    ("num_cores", "num_kv_heads", "prefix", "expected"),
    [(132, 8, 64, 1024), (132, 2, 16, 1024), (108, 8, 64, 768), (4, 8, 64, 256)],
)
def test_a_wave_has_about_a_tile_for_each_core(num_cores: int, num_kv_heads: int, prefix: int, expected: int) -> None:
    """The first is Qwen3-0.6B on an H200; the last has more heads than cores, and gets the least."""
    assert TileSizes(32, 128, prefix).wave_tokens(num_cores, num_kv_heads, 256) == expected
