"""The arrays of a forward, done by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from itemwise.backends.base import ForwardBatch, Layout
from itemwise.backends.fake import FakePrefix
from itemwise.contract.ragged import Ragged
from itemwise.engine.forward_batches import extend_batch, prefill_batch, rows_batch
from itemwise.plan.algorithms import ScorePlan
from itemwise.plan.label_rows import lay_out_segments, plan_labels
from itemwise.plan.shared_prefix import SplitItems
from tests.plan.planning import planner_of

PREFIX = np.array([7, 8, 9], np.int32)
ITEMS = [[10, 11], [9], [30, 31, 32]]  # the second is empty: it takes the last prefix token back
SHARED = [3, 2, 3]


def plan_of(algorithm: str, labels: list[tuple[int, ...]], *, prefix: bool = True, **options: Any) -> ScorePlan:
    prefix_ids, shared = (PREFIX, SHARED) if prefix else (PREFIX[:0], [0, 0, 0])
    split = SplitItems(prefix_ids, np.array(shared, np.int64), Ragged.from_rows(ITEMS))
    return planner_of(**options).plan(lay_out_segments(split, plan_labels(labels)), algorithm)


def listed(batch: ForwardBatch, *names: str) -> list[list[int]]:
    return [getattr(batch, name).tolist() for name in names]


def test_a_prefill_scores_nothing_and_keeps_its_only_segment() -> None:
    batch = prefill_batch(PREFIX)
    assert batch.layout is Layout.CAUSAL
    assert listed(batch, "token_ids", "positions", "segment_starts", "row_starts") == [
        [7, 8, 9],
        [0, 1, 2],
        [0, 3],
        [0, 3],
    ]
    assert listed(batch, "prefix_index", "prefix_lens", "score_tokens") == [[-1], [0], []]
    assert (batch.keep_segments, batch.need_normalizers, batch.num_tokens) == ((0,), False, 3)


def test_packed_is_a_prefix_and_its_items_row_after_row() -> None:
    plan = plan_of("packed", [(50,)], chunk_size=2)
    (planned,) = plan.batches
    batch = rows_batch(plan, planned, normalize=True)
    assert (batch.layout, batch.mask, batch.need_normalizers) == (Layout.PACKED, "segment", True)
    assert batch.token_ids.tolist() == [7, 8, 9, 10, 11, 9, 7, 8, 9, 30, 31, 32]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 2, 0, 1, 2, 3, 4, 5]
    assert listed(batch, "segment_starts", "row_starts") == [[0, 3, 5, 6, 9, 12], [0, 6, 12]]
    assert listed(batch, "prefix_index", "prefix_lens") == [[-1, 0, 0, -1, 1], [0, 3, 2, 0, 3]]
    assert batch.prefixes == (0, 3)
    assert listed(batch, "score_tokens", "label_ids") == [[4, 5, 11], [[50]] * 3]


def test_serial_is_a_copy_of_the_prefix_for_every_item() -> None:
    plan = plan_of("serial", [(50,)])
    (planned,) = plan.batches
    batch = rows_batch(plan, planned, normalize=False)
    assert batch.layout is Layout.CAUSAL
    assert batch.token_ids.tolist() == [7, 8, 9, 10, 11, 7, 8, 9, 9, 7, 8, 9, 30, 31, 32]
    assert listed(batch, "row_starts", "score_tokens") == [[0, 5, 9, 15], [4, 8, 14]]
    assert batch.prefixes == (0, 2, 4)


def test_extend_is_tails_that_read_a_cached_prefix() -> None:
    plan = plan_of("prefill_extend", [(50,)], chunk_size=2)
    first, second = plan.batches
    prefix = FakePrefix(3, PREFIX)
    batch = extend_batch(plan, second, prefix, normalize=False)
    assert batch.layout is Layout.EXTEND
    assert listed(batch, "token_ids", "positions", "segment_starts") == [[30, 31, 32], [3, 4, 5], [0, 3]]
    assert listed(batch, "prefix_index", "prefix_lens", "score_tokens") == [[0], [3], [2]]
    assert batch.prefixes == (prefix,)
    assert extend_batch(plan, first, prefix, normalize=False).positions.tolist() == [3, 4, 2]


def test_without_a_prefix_every_algorithm_has_tails_alone() -> None:
    for algorithm in ("serial", "packed"):
        plan = plan_of(algorithm, [(50,)], prefix=False)
        (planned,) = plan.batches
        batch = rows_batch(plan, planned, normalize=False)
        assert batch.layout is Layout.EXTEND
        assert listed(batch, "token_ids", "positions") == [[10, 11, 9, 30, 31, 32], [0, 1, 0, 0, 1, 2]]
        assert listed(batch, "prefix_index", "prefix_lens") == [[-1] * 3, [0] * 3]
        assert batch.prefixes == ()


def test_labels_of_many_tokens_are_read_along_their_stems() -> None:
    """Stems 51 and 52: a batch may end between the stems of one item, and the pattern of labels goes on."""
    plan = plan_of("packed", [(50,), (51, 60), (52, 61)], chunk_size=3, token_budget=12)
    batches = [rows_batch(plan, planned, normalize=True) for planned in plan.batches]
    assert [batch.token_ids.tolist() for batch in batches] == [
        [7, 8, 9, 10, 11, 51, 10, 11, 52, 9, 51],
        [7, 8, 9, 9, 52, 30, 31, 32, 51],
        [7, 8, 9, 30, 31, 32, 52],
    ]
    assert [batch.score_tokens.tolist() for batch in batches] == [[4, 5, 7, 8, 9, 10], [3, 4, 7, 8], [5, 6]]
    after_51, after_52 = [[50, 51, 0], [0, 60, 0]], [[0, 0, 52], [0, 0, 61]]
    assert [batch.label_ids.tolist() for batch in batches] == [
        [*after_51, *after_52, *after_51],
        [*after_52, *after_51],
        after_52,
    ]


def test_the_mask_of_the_plan_is_handed_on() -> None:
    plan = plan_of("packed", [(50,)], mask="dense")
    assert rows_batch(plan, plan.batches[0], normalize=False).mask == "dense"
