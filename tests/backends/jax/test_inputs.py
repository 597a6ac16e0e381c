from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.backends.jax.inputs import override_inputs, split_batch
from prefixwise.backends.jax.kv_cache import JaxKVBlock
from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.batch import EmbedOverrides, ForwardBatch, Layout
from prefixwise.forward.kv_pages import PageLease
from tests.backends.jax.batches import Suffix, draw_ids, extend_batch, prefill_batch, sequences_batch

Parts = list[tuple[ForwardBatch, Int64Array]]
BLOCK = JaxKVBlock(7, PageLease(0, lambda page: None), generation=0)


def batch_of(algorithm: str, tail_lens: list[int], chunk_size: int = 0, prefix_len: int = 7) -> ForwardBatch:
    """One forward over these items; its token ids count its tokens, its labels its scores."""
    suffixes = [Suffix(ids, prefix_len) for ids in draw_ids(0, *tail_lens)]
    if algorithm == "prefill_extend":
        batch = extend_batch(suffixes, [(BLOCK,)])
    else:
        step = 1 if algorithm == "serial" else chunk_size or len(suffixes)
        rows = [suffixes[start : start + step] for start in range(0, len(suffixes), step)]
        layout = Layout.CAUSAL if algorithm == "serial" else Layout.PACKED
        batch = sequences_batch(draw_ids(1, prefix_len)[0], rows, layout)
    label_ids = np.arange(len(batch.label_ids), dtype=np.int32)[:, None]
    return replace(batch, token_ids=np.arange(batch.num_tokens, dtype=np.int32), label_ids=label_ids)


def seen_by(batch: ForwardBatch) -> list[tuple[list[int], object]]:
    """Each segment's tokens, and what it reads: tokens of the batch, or blocks of the KV cache."""
    pieces = [batch.token_ids[start:stop].tolist() for start, stop in pairwise(batch.segment_starts.tolist())]
    read: list[object] = []
    for index, length in zip(batch.prefix_index.tolist(), batch.prefix_lens.tolist(), strict=True):
        prefix = batch.prefixes[index]
        if prefix.segment is None:
            read.append((prefix.blocks, length))
        else:
            start = batch.segment_starts[prefix.segment]
            read.append(batch.token_ids[start : start + length].tolist())
    return list(zip(pieces, read, strict=True))


BATCHES = st.builds(
    batch_of,
    st.sampled_from(["serial", "packed", "prefill_extend"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(0, 5).filter(lambda size: size != 1),
    st.sampled_from([7, 300]),  # of one block, of several
)


class TestSplitBatch:
    @settings(max_examples=200, deadline=None)
    @given(batch=BATCHES, num_shards=st.integers(1, 8))
    def test_every_token_and_every_score_is_on_one_shard(self, batch: ForwardBatch, num_shards: int) -> None:
        parts = split_batch(batch, num_shards)
        assert len(parts) == num_shards
        assert np.array_equal(np.concatenate([part.token_ids for part, _ in parts]), batch.token_ids)
        assert np.array_equal(np.concatenate([part.positions for part, _ in parts]), batch.positions)
        assert np.array_equal(np.concatenate([rows for _, rows in parts]), np.arange(len(batch.score_tokens)))
        for part, rows in parts:
            assert np.array_equal(part.token_ids[part.score_tokens], batch.token_ids[batch.score_tokens[rows]])
            assert np.array_equal(part.label_ids, batch.label_ids[rows])
            assert (part.layout, part.mask, part.need_logsumexp) == (batch.layout, batch.mask, True)

    @settings(max_examples=200, deadline=None)
    @given(batch=BATCHES, num_shards=st.integers(1, 8))
    def test_every_segment_sees_what_it_saw(self, batch: ForwardBatch, num_shards: int) -> None:
        parts = split_batch(batch, num_shards)
        assert [each for part, _ in parts for each in seen_by(part)] == seen_by(batch)
        for part, _ in parts:
            assert (part.segment_starts[0], part.segment_starts[-1]) == (0, part.num_tokens)

    @settings(max_examples=200, deadline=None)
    @given(batch=BATCHES, num_shards=st.integers(1, 8))
    def test_sequences_stay_whole_and_shards_are_as_even_as_they_allow(
        self, batch: ForwardBatch, num_shards: int
    ) -> None:
        parts = split_batch(batch, num_shards)
        is_extend = batch.layout is Layout.EXTEND
        edges = batch.segment_starts if is_extend else batch.sequence_starts
        if not is_extend:
            lens = [length for part, _ in parts for length in np.diff(part.sequence_starts).tolist() if length]
            assert lens == np.diff(batch.sequence_starts).tolist()
        even_share = batch.num_tokens / num_shards
        assert max(part.num_tokens for part, _ in parts) <= even_share + np.diff(edges).max()

    @pytest.mark.parametrize("algorithm", ["serial", "packed", "prefill_extend"])
    def test_more_shards_than_items(self, algorithm: str) -> None:
        parts = split_batch(batch_of(algorithm, [4]), 3)
        sizes = [part.num_tokens for part, _ in parts]
        assert sorted(sizes)[:2] == [0, 0]
        for part, rows in parts:
            if not part.num_tokens:
                assert len(rows) == len(part.score_tokens) == len(part.prefix_index) == 0
                assert part.segment_starts.tolist() == [0]
                assert part.sequence_starts.tolist() == [0, 0]

    def test_cuts_fall_where_the_tokens_are_even_not_the_items(self) -> None:
        parts = split_batch(batch_of("prefill_extend", [30, 5, 5, 5, 5, 10]), 2)
        assert [part.num_tokens for part, _ in parts] == [30, 30]
        assert [rows.tolist() for _, rows in parts] == [[0], [1, 2, 3, 4, 5]]

    def test_vectors_go_to_the_shard_of_their_token(self) -> None:
        batch = batch_of("prefill_extend", [5, 6, 4, 5])
        overridden = np.array([1, 4, 5, 19])
        vectors = np.stack([overridden, -overridden], 1).astype(np.float32)
        parts = [
            part for part, _ in split_batch(replace(batch, embed_overrides=EmbedOverrides(overridden, vectors)), 3)
        ]
        tokens, rows = override_inputs(parts, 16, np.float32)
        assert tokens.shape == (3, 16 + 16)  # no more than there are tokens
        found = []
        for part, of_shard, vectors_of_shard in zip(parts, tokens, rows, strict=True):
            assert of_shard[: part.num_tokens].tolist() == part.token_ids.tolist()
            places = of_shard[16:][of_shard[16:] < 16]
            found += part.token_ids[places].tolist()  # which count the batch's tokens
            assert vectors_of_shard[: len(places), 0].tolist() == part.token_ids[places].tolist()
        assert found == overridden.tolist()

    def test_one_shard_takes_the_batch_as_it_is(self) -> None:
        batch = batch_of("packed", [3, 4])
        ((part, rows),) = split_batch(batch, 1)
        assert part is batch
        assert rows.tolist() == [0, 1]

    def test_cached_segments_go_to_every_copy(self) -> None:
        batch = prefill_batch(draw_ids(0, 9, 300))
        parts = split_batch(batch, 3)
        assert [part is batch for part, _ in parts] == [True] * 3

    def test_of_segments_cached_and_scored_the_first_copy_answers(self) -> None:
        batch = replace(batch_of("packed", [3, 4]), cache_segments=(0,))
        parts = split_batch(batch, 3)
        assert [part is batch for part, _ in parts] == [True] * 3
        assert [rows.tolist() for _, rows in parts] == [[0, 1], [], []]
