"""The fake backend's arithmetic, by hand: everything around it is tested against this."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, FakeBlock, fake_logits
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, KVBlock, Layout, Prefix


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


# Two segments, 1 2 and 3; both read the first two tokens of the cached prefix 7 8 9.
BATCH = ForwardBatch(
    layout=Layout.EXTEND,
    token_ids=ids(1, 2, 3),
    positions=ids(2, 3, 2),
    segment_starts=np.array([0, 2, 3]),
    prefix_index=np.array([0, 0]),
    prefix_lens=np.array([2, 2]),
    prefixes=(Prefix((FakeBlock(3, ids(7, 8, 9)),)),),
    sequence_starts=np.array([0, 3]),
    score_tokens=np.array([0, 1, 2]),
    label_ids=np.array([[5, 6]] * 3, np.int32),
)


def logits_of(batch: ForwardBatch) -> list[list[float]]:
    found: list[list[float]] = FakeBackend(reads_short_blocks=True).forward(batch).label_logits.tolist()
    return found


def after(*context: int) -> list[float]:
    found: list[float] = fake_logits(ids(*context), ids(5, 6)).tolist()
    return found


def test_the_formula() -> None:
    """After 7, 8: 1 * 7 + 2 * 8 = 23, times the token, mod 97, tenths."""
    assert fake_logits(ids(7, 8), ids(0, 5, 6)) == pytest.approx([0.0, (5 * 23 % 97) / 10, (6 * 23 % 97) / 10])
    assert fake_logits(ids(8, 7), ids(5)) == pytest.approx([(5 * 22 % 97) / 10])


def test_a_token_sees_the_prefix_and_its_own_segment_up_to_itself() -> None:
    assert logits_of(BATCH) == [after(7, 8, 1), after(7, 8, 1, 2), after(7, 8, 3)]


def test_a_prefix_may_be_a_segment_of_the_same_forward() -> None:
    batch = replace(
        BATCH,
        positions=ids(0, 1, 2),
        prefix_index=np.array([-1, 0]),
        prefix_lens=np.array([0, 2]),
        prefixes=(Prefix(segment=0),),
    )
    assert logits_of(batch) == [after(1), after(1, 2), after(1, 2, 3)]


def test_a_prefix_may_begin_with_cached_blocks_and_continue_in_the_forward() -> None:
    """Two cached blocks, then the first segment; the second segment reads all of it."""
    cached = (FakeBlock(2, ids(7, 8)), FakeBlock(1, ids(9)))
    batch = replace(BATCH, positions=ids(3, 4, 5), prefix_lens=np.array([3, 5]), prefixes=(Prefix(cached, segment=0),))
    assert logits_of(batch) == [after(7, 8, 9, 1), after(7, 8, 9, 1, 2), after(7, 8, 9, 1, 2, 3)]


def test_a_segment_may_be_cached_and_read_in_the_same_forward() -> None:
    batch = replace(
        BATCH,
        positions=ids(2, 3, 4),
        prefix_lens=np.array([2, 4]),
        prefixes=(Prefix((FakeBlock(2, ids(7, 8)),), segment=0),),
        score_tokens=np.array([2]),
        label_ids=np.array([[5, 6]], np.int32),
        cache_segments=(0,),
    )
    output = FakeBackend(reads_short_blocks=True).forward(batch)
    assert output.label_logits.tolist() == [after(7, 8, 1, 2, 3)]
    assert [block.num_tokens for block in output.blocks] == [2]


def test_segments_of_one_forward_may_read_different_prefixes() -> None:
    prefixes = (Prefix((FakeBlock(3, ids(7, 8, 9)),)), Prefix((FakeBlock(2, ids(4, 4)),)))
    batch = replace(BATCH, prefix_index=np.array([0, 1]), prefixes=prefixes)
    assert logits_of(batch) == [after(7, 8, 1), after(7, 8, 1, 2), after(4, 4, 3)]


def test_labels_may_differ_from_row_to_row() -> None:
    batch = replace(BATCH, label_ids=np.array([[5, 6], [6, 5], [5, 5]], np.int32))
    assert logits_of(batch) == [after(7, 8, 1), after(7, 8, 1, 2)[::-1], [after(7, 8, 3)[0]] * 2]


def test_normalizers_are_over_the_whole_vocabulary_and_only_when_asked_for() -> None:
    backend = FakeBackend(vocab_size=20)
    output = backend.forward(replace(BATCH, need_logsumexp=True))
    every = fake_logits(ids(7, 8, 3), np.arange(20, dtype=np.int32)).astype(float)
    assert output.logsumexp is not None
    assert output.logsumexp[2] == pytest.approx(np.log(np.exp(every).sum()))
    assert backend.forward(BATCH).logsumexp is None


def test_segments_are_cached_when_asked_for() -> None:
    running = FakeBackend().start(replace(BATCH, cache_segments=(1, 0)))
    cached = [block for block in running.blocks if isinstance(block, FakeBlock)]
    assert [block.token_ids.tolist() for block in cached] == [[3], [1, 2]]
    assert [block.num_tokens for block in cached] == [1, 2]
    assert running.wait().blocks == running.blocks


def test_a_segment_longer_than_a_block_is_not_one() -> None:
    too_long = replace(
        BATCH,
        token_ids=np.zeros(KV_BLOCK_SIZE + 2, np.int32),
        segment_starts=np.array([0, KV_BLOCK_SIZE + 1, KV_BLOCK_SIZE + 2]),
        cache_segments=(0,),
    )
    with pytest.raises(AssertionError, match="one KV block"):
        FakeBackend().start(too_long)


def test_a_forward_may_score_nothing() -> None:
    batch = replace(BATCH, score_tokens=np.zeros(0, np.int64), label_ids=np.zeros((0, 2), np.int32))
    assert FakeBackend().forward(batch).label_logits.shape == (0, 2)


def test_it_remembers_its_forwards_but_not_for_ever() -> None:
    backend = FakeBackend()
    backend.forward(BATCH)
    assert backend.forwards == [BATCH]
    newest = replace(BATCH, need_logsumexp=True)
    for _ in range(5000):
        backend.start(newest)
    assert len(backend.forwards) <= 2000
    assert backend.forwards[-1] is newest


def test_a_block_of_another_backend_is_refused() -> None:
    class OtherBlock(KVBlock):
        pass

    with pytest.raises(AssertionError, match="another backend"):
        FakeBackend().forward(replace(BATCH, prefixes=(Prefix((OtherBlock(3),)),)))


@pytest.mark.parametrize(("bit_equal", "kind"), [(True, "cpu"), (False, "gpu")])
def test_it_can_stand_for_both_kinds_of_device(bit_equal: bool, kind: str) -> None:
    info = FakeBackend(bit_equal=bit_equal).info
    assert (info.algorithms_bit_equal, info.device_kind) == (bit_equal, kind)


def test_its_room_for_prefixes_and_its_steps_can_be_chosen() -> None:
    info = FakeBackend(num_kv_blocks=3, step_tokens=50, joins_prefill=True).info
    assert (info.num_kv_blocks, info.max_prefix_len, info.step_tokens) == (3, 3 * KV_BLOCK_SIZE, 50)
    assert info.joins_prefill
    assert not FakeBackend().info.joins_prefill


def test_a_forward_lists_no_more_blocks_than_it_may() -> None:
    """Those that its prefixes have, and those that it keeps."""
    twice = replace(BATCH, prefixes=BATCH.prefixes * 2)
    assert FakeBackend(max_kv_blocks_read=2).info.max_kv_blocks_read == 2
    FakeBackend(max_kv_blocks_read=2).forward(twice)
    with pytest.raises(AssertionError, match="lists 3 KV blocks, and may list 2"):
        FakeBackend(max_kv_blocks_read=2).forward(replace(twice, cache_segments=(0,)))
