"""The dense mask as the host makes it."""

from __future__ import annotations

import numpy as np
import pytest

from itemwise.backends.jax.attention.dense import make_mask
from itemwise.backends.jax.data_shards import split_batch
from itemwise.engine.forward_batches import rows_batch
from tests.plan.planning import planner_of, segments_of


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_every_shard_s_mask_shows_the_prefix_of_the_row_and_the_item_up_to_itself(num_shards: int) -> None:
    """Three rows of 4, 4 and 1 items: the last shard's rows begin far from the batch's first segment."""
    tail_lens = [3, 1, 2, 5, 4, 2, 2, 1, 6]
    plan = planner_of(chunk_size=4).plan(segments_of(7, tail_lens), "packed")
    batch = rows_batch(plan, plan.batches[0], normalize=False)
    for part, _ in split_batch(batch, num_shards):
        columns = int(np.diff(part.row_starts).max())
        mask = make_mask(part, (part.num_tokens + 5, columns + 3))
        assert not mask[part.num_tokens :].any()
        for segment, (start, stop) in enumerate(zip(part.segment_starts[:-1], part.segment_starts[1:], strict=True)):
            row_start = part.row_starts[part.row_starts <= start].max()
            is_prefix = part.prefix_index[segment] < 0
            for token in range(start, stop):
                own = set(range(start - row_start, token - row_start + 1))
                seen = own if is_prefix else {*range(7), *own}
                assert set(np.flatnonzero(mask[token])) == seen
