from __future__ import annotations

import torch

from prefixwise.backends.torch.kv_blocks import (
    OverlappingRanges,
    Piece,
    PrefixLocations,
    TorchBlock,
    gather_blocks,
    join_pieces,
    read_pieces,
)
from prefixwise.forward.batch import ForwardBatch, Prefix
from tests.attention_cases import CASE_NAMED, make_batch
from tests.backends.torch.batches import PREFIXES, prefill_batch

SEVERAL = make_batch(CASE_NAMED["several prefixes"])  # cached ones of 600, 31 and 5 tokens
MIXED = make_batch(CASE_NAMED["new KV blocks after cached ones"])  # 256 cached and on from token 0; on from token 148
CHAINS = prefill_batch(PREFIXES)  # of 300, 40 and 1 tokens, all in the batch


def copied(batch: ForwardBatch, *reads: tuple[int, int]) -> list[Piece]:
    locations = PrefixLocations(batch)
    return join_pieces(piece for read in reads for piece in locations.pieces(*read))


class TestPieces:
    def test_prefixes_that_are_read_whole_are_one_piece_and_not_copied(self) -> None:
        pieces = copied(SEVERAL, (0, 600), (1, 31), (2, 5))
        assert pieces == [Piece(True, 0, 636)]
        cached = torch.rand(636, 2, 4), torch.rand(636, 2, 4)
        keys, values = read_pieces(pieces, torch.rand(3, 2, 4), torch.rand(3, 2, 4), cached)
        assert (keys.data_ptr(), values.data_ptr()) == (cached[0].data_ptr(), cached[1].data_ptr())

    def test_cached_blocks_come_before_those_of_the_batch(self) -> None:
        assert copied(MIXED, (0, 200)) == [Piece(True, 0, 200)]
        assert copied(MIXED, (0, 256)) == [Piece(True, 0, 256)]
        assert copied(MIXED, (0, 384)) == [Piece(True, 0, 256), Piece(False, 0, 128)]
        assert copied(MIXED, (1, 256)) == [Piece(False, 148, 404)]


class TestOverlappingRanges:
    def test_blocks_of_the_batch_are_read_where_they_are(self) -> None:
        found = OverlappingRanges.of(PrefixLocations(CHAINS), [(0, 128), (0, 256), (1, 40)])
        assert found == OverlappingRanges([Piece(False, 0, 340)], [0, 0, 300])

    def test_cached_blocks_too(self) -> None:
        found = OverlappingRanges.of(PrefixLocations(SEVERAL), [(1, 30), (1, 31), (2, 5)])
        assert found == OverlappingRanges([Piece(True, 600, 636)], [0, 0, 31])

    def test_a_mixture_is_copied_with_every_prefix_once(self) -> None:
        found = OverlappingRanges.of(PrefixLocations(MIXED), [(0, 256), (0, 384), (1, 128), (1, 256)])
        assert found.pieces == [Piece(True, 0, 256), Piece(False, 0, 128), Piece(False, 148, 404)]
        assert found.starts == [0, 0, 384, 384]


class TestGatherBlocks:
    def test_every_layer_sees_the_blocks_of_all_prefixes_in_order(self) -> None:
        blocks = [TorchBlock(n, torch.rand(3, 2, n, 2, 4)) for n in (128, 44, 7)]
        layers = gather_blocks([Prefix(tuple(blocks[:2])), Prefix((), 0), Prefix((blocks[2],))])
        assert layers is not None
        for number, (keys, values) in enumerate(layers):
            assert torch.equal(keys, torch.cat([block.keys_values[number, 0] for block in blocks]))
            assert torch.equal(values, torch.cat([block.keys_values[number, 1] for block in blocks]))

    def test_a_single_block_is_not_copied(self) -> None:
        block = TorchBlock(5, torch.rand(3, 2, 5, 2, 4))
        layers = gather_blocks([Prefix((block,))])
        assert layers is not None
        assert layers[0][0].data_ptr() == block.keys_values.data_ptr()

    def test_without_cached_blocks_there_is_nothing(self) -> None:
        assert gather_blocks([Prefix((), 0)]) is None
