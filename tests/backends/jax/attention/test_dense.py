"""The dense mask as the host makes it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from prefixwise.backends.jax.attention.dense import make_mask
from prefixwise.backends.jax.inputs import split_batch, token_sequences
from prefixwise.forward.batch import Layout
from tests.backends.jax.batches import Suffix, draw_ids, sequences_batch

PREFIX_LEN = 150  # a block, and 22 tokens


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_every_shard_s_mask_shows_the_prefix_of_the_row_and_the_segment_up_to_itself(num_shards: int) -> None:
    """Three rows of 4, 4 and 1 items: the last shard's rows begin far from the batch's first segment."""
    (prefix,) = draw_ids(0, PREFIX_LEN)
    lens = [PREFIX_LEN, PREFIX_LEN - 1, PREFIX_LEN, 0, *[PREFIX_LEN] * 5]
    suffixes = [Suffix(ids, length) for ids, length in zip(draw_ids(1, 3, 1, 2, 5, 4, 2, 2, 1, 6), lens, strict=True)]
    batch = sequences_batch(prefix, [suffixes[:4], suffixes[4:8], suffixes[8:]], Layout.PACKED, "dense")
    for part, _ in split_batch(batch, num_shards):
        columns = int(np.diff(part.sequence_starts).max())
        mask = make_mask(part, (part.num_tokens + 5, columns + 3))
        assert not mask[part.num_tokens :].any()
        for segment, (start, stop) in enumerate(pairwise(part.segment_starts)):
            first = token_sequences(part)[start]
            for token in range(start, stop):
                own = range(start - first, token - first + 1)
                assert set(np.flatnonzero(mask[token])) == {*range(part.prefix_lens[segment]), *own}
