"""The fake backend's arithmetic, by hand: everything around it is tested against this."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from itemwise.backends.base import ForwardBatch, Layout, PrefixState
from itemwise.backends.fake import FakeBackend, FakePrefix, fake_logits
from itemwise.contract.ragged import Int32Array


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
    prefixes=(FakePrefix(3, ids(7, 8, 9)),),
    row_starts=np.array([0, 3]),
    score_tokens=np.array([0, 1, 2]),
    label_ids=np.array([[5, 6]] * 3, np.int32),
)


def logits_of(batch: ForwardBatch) -> list[list[float]]:
    found: list[list[float]] = FakeBackend().forward(batch).label_logits.tolist()
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
    batch = replace(BATCH, prefix_index=np.array([-1, 0]), prefix_lens=np.array([0, 2]), prefixes=(0,))
    assert logits_of(batch) == [after(1), after(1, 2), after(1, 2, 3)]


def test_normalizers_are_over_the_whole_vocabulary_and_only_when_asked_for() -> None:
    backend = FakeBackend(vocab_size=20)
    output = backend.forward(replace(BATCH, need_normalizers=True))
    every = fake_logits(ids(7, 8, 3), np.arange(20, dtype=np.int32)).astype(float)
    assert output.log_normalizers is not None
    assert output.log_normalizers[2] == pytest.approx(np.log(np.exp(every).sum()))
    assert backend.forward(BATCH).log_normalizers is None


def test_segments_are_kept_when_asked_for() -> None:
    output = FakeBackend().forward(replace(BATCH, keep_segments=(1, 0)))
    kept = [prefix for prefix in output.prefixes if isinstance(prefix, FakePrefix)]
    assert [prefix.token_ids.tolist() for prefix in kept] == [[3], [1, 2]]
    assert [(prefix.num_tokens, prefix.num_bytes) for prefix in kept] == [(1, 4), (2, 8)]


def test_a_forward_may_score_nothing() -> None:
    batch = replace(BATCH, score_tokens=np.zeros(0, np.int64), label_ids=np.zeros((0, 2), np.int32))
    assert FakeBackend().forward(batch).label_logits.shape == (0, 2)


def test_it_remembers_its_forwards() -> None:
    backend = FakeBackend()
    backend.forward(BATCH)
    assert backend.forwards == [BATCH]


def test_a_prefix_of_another_backend_is_refused() -> None:
    class OtherPrefix(PrefixState):
        @property
        def num_bytes(self) -> int:
            return 0

    with pytest.raises(AssertionError, match="another backend"):
        FakeBackend().forward(replace(BATCH, prefixes=(OtherPrefix(3),)))


@pytest.mark.parametrize(("bit_equal", "kind"), [(True, "cpu"), (False, "gpu")])
def test_it_can_stand_for_both_kinds_of_device(bit_equal: bool, kind: str) -> None:
    info = FakeBackend(bit_equal=bit_equal).info
    assert (info.algorithms_bit_equal, info.device_kind) == (bit_equal, kind)
