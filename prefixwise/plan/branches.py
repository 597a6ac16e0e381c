"""Branches: a request as prefixes in the KV cache, and the segments that are scored behind each of them.

    trunk      the query, and all items that are computed in one piece; most requests have no other branch
    long item  the query and the item's head (`long_items.py`), and its tail
    sequence   of serial and packed behind a long prefix: blocks of its own, and its items

A branch is made when its turn comes, as its tokens are a copy of the query's and the item's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, numbers, ranges, starts_from_lens
from prefixwise.plan.algorithms import PackedSequence, ScorePlan
from prefixwise.plan.long_items import prefix_block_starts
from prefixwise.plan.segments import Segments


@dataclass(frozen=True, eq=False)
class BranchPlan:
    """A prefix, and what is scored behind it, in *units*: segments (the tokens of an item and a label stem) or, for
    serial and packed, whole sequences."""

    prefix_ids: Int32Array  # to be cached as KV blocks; empty: none
    block_starts: Sequence[int]  # of the prefix; at last, where its last block ends
    num_query_blocks: int  # its first blocks, which are the query's; the others are the branch's own
    scoring: ScorePlan | None  # of this branch alone; None: compute the prefix only
    vectors: Vectors | None  # of ids below 0
    rows: Int64Array | None = None  # of the request's label logits, which this branch gives; None: all

    @property
    def num_blocks(self) -> int:
        return len(self.block_starts) - 1

    @cached_property
    def unit_starts(self) -> Sequence[int]:
        """Where the tokens of each unit begin among those of all units; at last, where they end."""
        if self.scoring is None:
            return (0,)
        if self.scoring.sequences:
            return list(accumulate((each.num_tokens for each in self.scoring.sequences), initial=0))
        starts: list[int] = self.scoring.segments.tokens.starts.tolist()
        return starts

    @property
    def num_units(self) -> int:
        return len(self.unit_starts) - 1

    @property
    def num_tokens(self) -> int:
        """The tokens to compute if none of them is cached."""
        return self.block_starts[-1] + self.unit_starts[-1] - self.scored_block_tokens(self.num_blocks)

    def units_of_blocks(self, first: int, stop: int) -> list[int]:
        """The units that are KV blocks first..stop of the prefix themselves: the block's forward scores them."""
        units = None if self.scoring is None else self.scoring.segments.segment_of_block
        return [] if units is None else [unit for unit in units[first:stop].tolist() if unit >= 0]

    def scored_block_tokens(self, stop: int) -> int:
        """Tokens of the first blocks that are units."""
        return sum(self.unit_tokens(unit, unit + 1) for unit in self.units_of_blocks(0, stop))

    @property
    def max_unit_tokens(self) -> int:
        """Tokens of the largest unit."""
        if self.scoring is None:
            return 0
        if self.scoring.sequences:
            return max(sequence.num_tokens for sequence in self.scoring.sequences)
        return int(self.scoring.segments.tokens.lens.max(initial=0))

    def block_tokens(self, first: int, stop: int) -> int:
        """Tokens of the prefix blocks first..stop."""
        return self.block_starts[stop] - self.block_starts[first]

    def block_pairs(self, first: int, stop: int) -> int:
        """Query-key pairs of the prefix blocks first..stop."""
        num_tokens = self.block_tokens(first, stop)
        return num_tokens * self.block_starts[first] + num_tokens**2 // 2

    @cached_property
    def pairs_per_unit_token(self) -> float:
        """Query-key pairs of the units' tokens, on average."""
        return 0.0 if self.scoring is None else self.scoring.num_unit_pairs / self.scoring.num_unit_tokens

    def unit_tokens(self, first: int, stop: int) -> int:
        return self.unit_starts[stop] - self.unit_starts[first]

    def segments_of(self, first: int, stop: int) -> tuple[int, int]:
        """The segments of units first..stop."""
        assert self.scoring is not None
        sequences = self.scoring.sequences
        return (sequences[first].first, sequences[stop - 1].stop) if sequences else (first, stop)

    def logit_rows(self, segments: tuple[int, int]) -> tuple[int, int]:
        """The rows of the branch's label logits that these segments give."""
        assert self.scoring is not None
        rows = self.scoring.segments.rows_of_segment
        return int(rows[segments[0]]), int(rows[segments[1]])

    def last_unit_that_fits(self, first: int, max_tokens: int) -> int:
        """The end of the run of units from `first` on that has at most `max_tokens`."""
        assert self.scoring is not None, "a prefix alone has no units"
        starts, plan = self.unit_starts, self.scoring
        stop = bisect_right(starts, starts[first] + max_tokens) - 1
        if plan.max_segments and plan.sequences:
            most = plan.sequences[first].first + plan.max_segments
            return bisect_right(plan.sequences, most, first, max(first, stop), key=lambda each: each.stop)
        return min(stop, first + plan.max_segments) if plan.max_segments else stop


class BranchPlans:
    """The branches of a request: the trunk, if there is one, then sequences in pieces, then long items."""

    def __init__(self, plan: ScorePlan | None, prefix_ids: Int32Array, vectors: Vectors | None = None) -> None:
        """`prefix_ids`: the query's tokens that are cached for all branches; empty for serial and packed."""
        self._plan = plan
        self._vectors = vectors
        self._sequences = plan.sequences if plan is not None and plan.splits_sequences else ()
        self._long_items = () if plan is None else plan.long_items
        self.trunk = self._make_trunk(prefix_ids)

    def __len__(self) -> int:
        return (self.trunk is not None) + len(self._sequences) + len(self._long_items)

    def __getitem__(self, index: int) -> BranchPlan:
        """Make the branch. Raises IndexError behind the last one."""
        if self.trunk is not None:
            if not index:
                return self.trunk
            index -= 1
        if index < len(self._sequences):
            return self._sequence_branch(self._sequences[index])
        return self._long_branch(self._long_items[index - len(self._sequences)])

    @cached_property
    def num_tokens(self) -> int:
        """The tokens to compute if none of them is cached."""
        num_tokens = 0 if self.trunk is None else self.trunk.num_tokens
        num_tokens += sum(sequence.num_tokens for sequence in self._sequences)
        if not self._long_items:
            return num_tokens
        heads, tails, query_tokens = self._cut_long_items()
        return num_tokens + int(heads.sum() - query_tokens.sum() + tails.sum())

    @cached_property
    def max_unit_tokens(self) -> int:
        """Tokens of the largest unit: it is never split."""
        largest = [0] if self.trunk is None else [self.trunk.max_unit_tokens]
        if self._plan is not None and self._sequences:
            largest.append(int(self._plan.whole_segments.tokens.lens.max()))
        if self._long_items:
            largest.append(int(self._cut_long_items()[1].max()))
        return max(largest)

    def _cut_long_items(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Tokens of each long item's query and head, of its segments behind them, and of the trunk's blocks in it."""
        assert self._plan is not None
        assert self._plan.cut is not None
        segments, per_item = self._plan.segments, self._plan.segments.segments_per_item
        items = np.array(self._long_items)
        shared, lens = segments.prefix_lens[per_item * items], segments.item_lens[per_item * items]
        heads = self._plan.cut.head_lens(shared, lens)
        chosen = (per_item * items[:, None] + numbers(per_item)).reshape(-1)
        tails = segments.tokens.lens[chosen] + np.repeat(shared - heads, per_item)
        has_trunk = self._plan.needs_prefill
        query_tokens = self._plan.cut.query_tokens(shared, len(segments.prefix_ids)) if has_trunk else 0 * heads
        return heads, tails, query_tokens

    def _make_trunk(self, prefix_ids: Int32Array) -> BranchPlan | None:
        """The query, and the items that are computed in one piece behind it or, in sequences, with it."""
        plan = self._plan
        if plan is not None and plan.long_items and not len(plan.whole_segments.tokens):
            if len(prefix_ids):  # what the long items share of it
                prefix_ids = prefix_ids[: int(self._cut_long_items()[2].max())]
            plan = None
        elif plan is not None and plan.splits_sequences:
            plan = None
        if plan is None and not len(prefix_ids) and self._plan is not None:
            return None
        rows = None
        if plan is not None and plan.long_items:
            rows = plan.segments.rows_of(plan.whole_indices)
            plan = replace(plan, segments=plan.whole_segments, long_items=())
        starts: Sequence[int] = prefix_block_starts(len(prefix_ids))
        if plan is not None and plan.needs_prefill and plan.segments.block_starts is not None:
            starts = plan.segments.block_starts
        return BranchPlan(prefix_ids, starts, len(starts) - 1, plan, self._vectors, rows)

    def _sequence_branch(self, sequence: PackedSequence) -> BranchPlan:
        """A sequence of serial or packed: the blocks of its prefix, and its segments behind them."""
        assert self._plan is not None
        segments = self._plan.whole_segments
        chosen = np.arange(sequence.first, sequence.stop)
        rows = self._plan.segments.rows_of(self._plan.whole_indices[chosen])
        return self._own_branch(segments.take(chosen), prefix_block_starts(len(segments.prefix_ids)), 0, rows)

    def _long_branch(self, item: int) -> BranchPlan:
        """The query, the item's head, and its tail with each stem."""
        plan = self._plan
        assert plan is not None
        assert plan.cut is not None
        whole, per_item = plan.segments, plan.segments.segments_per_item
        chosen = np.arange(per_item * item, per_item * (item + 1))
        segments = whole.take(chosen)
        shared = segments.prefix_lens[:1]
        head = plan.cut.head_lens(shared, segments.item_lens[:1])
        starts = plan.cut.block_starts(int(shared[0]), int(head[0]))
        query_tokens = int(plan.cut.query_tokens(shared, len(whole.prefix_ids))[0]) if plan.needs_prefill else 0
        return self._own_branch(
            _with_longer_prefix(segments, int(head[0])), starts, starts.index(query_tokens), whole.rows_of(chosen)
        )

    def _own_branch(
        self, segments: Segments, block_starts: list[int], num_query_blocks: int, rows: Int64Array
    ) -> BranchPlan:
        """A branch whose segments run by themselves behind all of its prefix."""
        assert self._plan is not None
        plan = replace(
            self._plan, algorithm="prefill_extend", mask=None, segments=segments, sequences=(), long_items=()
        )
        return BranchPlan(segments.prefix_ids, block_starts, num_query_blocks, plan, self._vectors, rows)


def _with_longer_prefix(segments: Segments, prefix_len: int) -> Segments:
    """Segments of one item; the item's first tokens move to its prefix, which they all read."""
    shared = int(segments.prefix_lens[0])
    num_moved = prefix_len - shared
    lens = segments.tokens.lens - num_moved
    tokens = Ragged(segments.tokens.flat[ranges(segments.tokens.starts[:-1] + num_moved, lens)], starts_from_lens(lens))
    num_rows = np.diff(segments.rows_of_segment)
    return replace(
        segments,
        prefix_ids=np.concatenate([segments.prefix_ids[:shared], segments.tokens[0][:num_moved]]),
        prefix_lens=np.full(len(lens), prefix_len),
        tokens=tokens,
        score_offsets=ranges(tokens.starts[1:] - num_rows, num_rows),
    )
