from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefixwise.backends.torch.cuda.inputs import (
    SCORED,
    SCORED_ROWS,
    ForwardInputs,
    ProgramSpec,
    TileArrays,
    capacities,
    flat,
    host_inputs,
    packing,
    unpack,
)
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.kv_pages import NOT_CACHED, batch_tiles
from prefixwise.forward.tiles import PREFIX, WIDE, TileSizes
from tests.attention_cases import CASES, AttentionCase, make_batch
from tests.backends.torch.batches import PREFIXES, prefill_batch

SIZES = TileSizes(narrow=0, wide=32, prefix=64, has_token_arrays=False)


def round_trip(spec: ProgramSpec, inputs: ForwardInputs[Int32Array], max_blocks: int = 64) -> ForwardInputs[Int32Array]:
    """As they would arrive on the device."""
    layout = packing(capacities(spec, SIZES, max_blocks))
    target = np.full(layout.size, 7_777, np.int32)
    layout.pack(flat(inputs), target)
    return unpack(layout, target)


class TestRoundTrip:
    @pytest.mark.parametrize(
        "case", [case for case in CASES if not case.cached_prefix_lens], ids=lambda case: case.name
    )
    def test_every_array_arrives(self, case: AttentionCase) -> None:
        batch = make_batch(case)
        spec = ProgramSpec(-(-batch.num_tokens // 256) * 256, "batch", scores=False)
        sent = host_inputs(batch, spec, SIZES, batch_tiles(batch), {})
        found = round_trip(spec, sent)
        for name in TileArrays._fields:
            array = getattr(sent.tiles, name)
            assert np.array_equal(getattr(found.tiles, name)[: len(array)], array), name
        assert np.array_equal(found.token_ids[: batch.num_tokens], batch.token_ids)

    def test_padding_is_tokens_too(self) -> None:
        batch = make_batch(CASES[0])
        found = round_trip(
            ProgramSpec(512, "cache", scores=True),
            host_inputs(batch, ProgramSpec(512, "cache", scores=True), SIZES, batch_tiles(batch), {}),
        )
        assert not found.token_ids[batch.num_tokens :].any()
        assert not found.positions[batch.num_tokens :].any()
        assert (found.cache_slots == NOT_CACHED).all()
        assert not found.score_tokens.any()


class TestCacheSlots:
    def test_cached_segments_go_to_their_pages(self) -> None:
        batch = prefill_batch(PREFIXES[:1])  # 300 tokens: segments of 128, 128 and 44
        spec = ProgramSpec(512, "cache", scores=False)
        blocks = [np.array([640, 0, 128])]
        slots = host_inputs(batch, spec, SIZES, blocks, {0: 640, 2: 128}).cache_slots
        assert np.array_equal(slots[:128], np.arange(640, 768))
        assert (slots[128:256] == NOT_CACHED).all()
        assert np.array_equal(slots[256:300], np.arange(128, 172))
        assert (slots[300:] == NOT_CACHED).all()


class TestCapacities:
    @pytest.mark.parametrize("lens", [(1,) * 256, (33,) * 7, (128, 128), (64, 65, 1, 2), (256,)])
    def test_no_batch_of_the_size_has_more(self, lens: tuple[int, ...]) -> None:
        """Each segment reads another length of a prefix, so that no two share a tile."""
        reads = tuple(range(1, len(lens) + 1))
        batch = make_batch(AttentionCase("many", lens, (0,) * len(lens), reads, (300,)))
        batch = replace(batch, score_tokens=np.arange(batch.num_tokens))
        spec = ProgramSpec(256, "cache", scores=True)
        tiles = host_inputs(batch, spec, SIZES, [np.arange(3) * 128], {}).tiles
        room = capacities(spec, SIZES, 64).tiles
        for name in TileArrays._fields:
            assert len(getattr(tiles, name)) <= getattr(room, name), name
        assert tiles.counts[WIDE] == sum(-(-length // 32) for length in lens)
        assert tiles.counts[PREFIX] == tiles.counts[SCORED] == sum(-(-length // 64) for length in lens)

    @pytest.mark.parametrize(("num_score_rows", "expected"), [(0, 5), (3, 5), (96, 96)])
    def test_scored_tokens_are_padded(self, num_score_rows: int, expected: int) -> None:
        batch = replace(make_batch(CASES[0]), score_tokens=np.arange(5))
        spec = ProgramSpec(512, "cache", scores=True)
        tiles = host_inputs(batch, spec, SIZES, batch_tiles(batch), {}, num_score_rows).tiles
        assert tiles.counts[SCORED_ROWS] == expected


class TestSpec:
    def test_titles_name_the_kind(self) -> None:
        sequences = ProgramSpec(256, "batch", scores=True)
        found = [
            sequences.title,
            replace(sequences, reads="cache").title,
            replace(sequences, reads="cache", scores=False).title,
        ]
        assert found == ["sequences, 256 tokens", "extend, 256 tokens", "prefill, 256 tokens"]
