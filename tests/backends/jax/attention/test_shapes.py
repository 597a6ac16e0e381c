from __future__ import annotations

import numpy as np
import pytest

from prefixwise.backends.jax.attention.shapes import SHAPE_NAMED, SHAPES, AttentionShape


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("fraction", [1.0, 0.3, 0.01])
def test_segments_read_what_is_there_at_any_scale(shape: AttentionShape, fraction: float) -> None:
    scaled = shape.scaled(fraction)
    assert len(scaled.segment_lens) == len(scaled.prefix_index) == len(scaled.read_lens) > 0
    assert set(scaled.prefix_index) == set(range(len(scaled.prefix_lens)))
    assert min(scaled.segment_lens) > 0
    for prefix, read in zip(scaled.prefix_index, scaled.read_lens, strict=True):
        assert 0 <= read <= scaled.prefix_lens[prefix]
    if fraction == 1:
        assert scaled == shape


def test_scaling_keeps_what_makes_a_shape() -> None:
    contract = SHAPE_NAMED["contract"].scaled(0.1)
    assert (contract.prefix_lens, contract.segment_lens) == ((200,), (2,) * 50)
    assert contract.read_lens == (200,) * 50
    assert SHAPE_NAMED["many_requests"].scaled(0.1).prefix_index == tuple(range(16))
    assert SHAPE_NAMED["empty_item"].scaled(0.1).read_lens == (199,)


def test_flops_count_every_pair_once() -> None:
    shape = AttentionShape("two", (7, 5), (3, 4), (0, 1), (7, 4), num_heads=2, num_kv_heads=1, head_size=8)
    seen = np.tril(np.ones((3, 3))).sum() + 3 * 7 + np.tril(np.ones((4, 4))).sum() + 4 * 4
    assert shape.flops == 2 * 2 * 2 * 8 * seen  # two products, two operations
