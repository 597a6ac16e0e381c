from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.backends.jax.placement import HeadPlacement

NAMED = [  # query heads, KV heads, shards -> KV slots of a shard, query heads of a slot
    (16, 8, 8, 1, 2),  # Qwen3-0.6B
    (16, 8, 1, 8, 2),
    (12, 2, 4, 1, 3),  # Qwen2.5-1.5B
    (12, 2, 8, 1, 2),
    (9, 3, 2, 2, 3),  # SmolLM2
    (9, 3, 8, 1, 2),
    (8, 1, 8, 1, 1),  # Gemma
    (6, 3, 2, 2, 2),  # no less work with three slots of one query head each: the wider
]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "tp_size", "num_slots", "width"), NAMED)
def test_models_we_name(num_heads: int, num_kv_heads: int, tp_size: int, num_slots: int, width: int) -> None:
    placement = HeadPlacement.plan(num_heads, num_kv_heads, tp_size)
    assert placement.q_heads.shape == (tp_size, num_slots, width)
    assert placement.kv_heads.shape == (tp_size, num_slots)
    assert (placement.tp_size, placement.kv_heads_per_shard, placement.heads_per_kv) == (tp_size, num_slots, width)


def test_the_pictures_in_the_docstring() -> None:
    split = HeadPlacement.plan(12, 2, 4)
    assert split.q_heads.tolist() == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[9, 10, 11]]]
    assert split.kv_heads.tolist() == [[0], [0], [1], [1]]
    padded = HeadPlacement.plan(9, 3, 2)
    assert padded.q_heads.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [-1, -1, -1]]]
    assert padded.kv_heads.tolist() == [[0, 1], [2, -1]]


@given(num_kv_heads=st.integers(1, 64), heads_per_kv=st.integers(1, 16), tp_size=st.integers(1, 64))
def test_every_query_head_is_somewhere_once_beside_its_own_kv_head(
    num_kv_heads: int, heads_per_kv: int, tp_size: int
) -> None:
    num_heads = num_kv_heads * heads_per_kv
    placement = HeadPlacement.plan(num_heads, num_kv_heads, tp_size)
    assert placement.q_heads.dtype == placement.kv_heads.dtype == np.int64
    assert placement.q_heads.shape[:2] == placement.kv_heads.shape
    assert placement.tp_size == tp_size
    is_real = placement.q_heads >= 0
    assert placement.q_heads[is_real].tolist() == list(range(num_heads)), "once each, in order"
    kv_heads = np.broadcast_to(placement.kv_heads[..., None], placement.q_heads.shape)
    assert np.array_equal(kv_heads[is_real], placement.q_heads[is_real] // heads_per_kv)
    assert np.array_equal(placement.kv_heads >= 0, is_real.any(axis=2)), "a KV head without readers is zeros"


@given(num_kv_heads=st.integers(1, 64), heads_per_kv=st.integers(1, 16))
def test_one_shard_holds_the_model_as_it_is(num_kv_heads: int, heads_per_kv: int) -> None:
    num_heads = num_kv_heads * heads_per_kv
    placement = HeadPlacement.plan(num_heads, num_kv_heads, 1)
    assert np.array_equal(placement.q_heads, np.arange(num_heads).reshape(1, num_kv_heads, heads_per_kv))
    assert np.array_equal(placement.kv_heads, np.arange(num_kv_heads).reshape(1, num_kv_heads))


@given(kv_heads_per_shard=st.integers(1, 8), heads_per_kv=st.integers(1, 16), tp_size=st.integers(1, 16))
def test_nothing_is_padded_or_repeated_where_the_kv_heads_divide(
    kv_heads_per_shard: int, heads_per_kv: int, tp_size: int
) -> None:
    num_kv_heads = kv_heads_per_shard * tp_size
    placement = HeadPlacement.plan(num_kv_heads * heads_per_kv, num_kv_heads, tp_size)
    assert placement.q_heads.shape == (tp_size, kv_heads_per_shard, heads_per_kv)
