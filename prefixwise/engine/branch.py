"""One branch of a request in the scheduler (`plan/branches.py`): how far its KV blocks and its units have come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from prefixwise.contract.ragged import Int64Array
from prefixwise.engine.prefix_cache import CacheEntry, Key, PrefixCache
from prefixwise.forward.batch import KVBlock
from prefixwise.plan.branches import BranchPlan

if TYPE_CHECKING:
    from prefixwise.engine.request_state import RequestState

is_launched, is_computed = attrgetter("is_launched"), attrgetter("is_computed")  # of branches, and of cache entries


class Branch:
    """How far one branch of a request has come: its KV blocks, then its units.

    The scheduler's thread owns it. While a step is in flight, the device thread reads and writes the KV blocks in
    `entries`. The scheduler fills the next step meanwhile, and only needs to know which blocks have been launched.
    """

    def __init__(self, request: RequestState, plan: BranchPlan, keys: tuple[Key | None, ...]) -> None:
        self.request = request
        self.plan = plan
        self.keys = keys  # one per prefix block; None: nobody else may read the block
        self.entries: list[CacheEntry] | None = None  # one per prefix block, once the cache has room for all of them
        self.num_in_flight = 0  # parts of it in in-flight steps
        self._first_unlaunched = 0  # of the entries: those before it are launched
        self._prefilled_tokens = 0
        self._num_units = plan.num_units
        self._next_unit = 0  # to be launched
        self._in_blocks: set[int] = set()  # launched units whose tokens count as those of KV blocks of the prefix
        self.pairs_per_unit_token = plan.pairs_per_unit_token

    # The prefix

    @property
    def is_reserved(self) -> bool:
        """It has an entry for every block of its prefix."""
        return self.entries is not None or not self.keys

    def reserve_prefix(self, cache: PrefixCache) -> bool:
        """Reserve KV blocks for the whole prefix. False if the cache has no room for them now."""
        if self.is_reserved:
            return True
        self.entries = cache.acquire(self.keys, self, group=self.request)
        if self.entries is None:
            return False
        num_hits = 0
        for entry in self.entries:
            if entry.owner is self:
                break
            num_hits += 1
        self.request.count_hits(self, self.plan.block_starts[num_hits])
        return True

    def release_prefix(self, cache: PrefixCache) -> None:
        if self.entries is not None:
            cache.release(self.entries, self)
            self.entries, self._first_unlaunched = None, 0

    def invalidate_prefix(self, cache: PrefixCache) -> int:
        """Release the prefix, which must be computed again; its units that are scored stay so. Returns how many tokens
        this branch must compute again. No part of it is in flight, and what failed is rolled back."""
        self.release_prefix(cache)
        lost, self._prefilled_tokens = self._prefilled_tokens, 0
        # Units that are blocks and were scored behind cached ones: now their blocks are to be computed as well.
        in_prefix = self.plan.units_of_blocks(0, self.plan.num_blocks)
        behind_blocks = {unit for unit in in_prefix if unit < self._next_unit} - self._in_blocks
        self._in_blocks |= behind_blocks
        return lost + sum(self.plan.unit_tokens(unit, unit + 1) for unit in behind_blocks)

    def lose_query(self, reader: BranchPlan) -> int:
        """The blocks of this branch, which is done, are lost. Returns how many tokens of those that `reader` reads it
        had computed: the first reader computes them again."""
        num_read = reader.block_starts[reader.num_query_blocks]
        lost = max(0, num_read - (self.plan.block_starts[-1] - self._prefilled_tokens))
        self._prefilled_tokens = 0
        return lost

    def blocks_within(self, first: int, max_tokens: int) -> int:
        """The end of the blocks to compute from `first` on, the first one that is not launched, within `max_tokens`. It
        is `first` itself if another branch computes that block."""
        starts, stop = self.plan.block_starts, first
        most = starts[first] + max_tokens
        for entry in (self.entries or ())[first:]:
            if starts[stop + 1] > most or (entry.owner is not self and entry.owner is not None):
                break
            stop += 1
        return stop

    @property
    def num_blocks_launched(self) -> int:
        """How many blocks from the start the device has been given. It never takes one back, so the search goes on
        where it ended."""
        entries, first = self.entries or (), self._first_unlaunched
        while first < len(entries) and entries[first].is_launched:
            first += 1
        self._first_unlaunched = first
        return first

    def count_prefill(self, num_tokens: int) -> None:
        """The device has computed blocks with so many tokens."""
        self.request.tokens_left -= num_tokens
        self._prefilled_tokens += num_tokens

    def cached_blocks(self, stop: int | None = None) -> tuple[KVBlock, ...]:
        """The KV blocks of the prefix, up to `stop`."""
        entries = (self.entries or [])[:stop]
        blocks = tuple([entry.block for entry in entries if entry.block is not None])
        assert len(blocks) == len(entries), "a block is read before it is computed"
        return blocks

    # Units

    def units_of_blocks(self, first: int, stop: int) -> list[int]:
        """The units to launch that are blocks first..stop of the prefix themselves. After a failure a block is computed
        again, but not scored again."""
        units = self.plan.units_of_blocks(first, stop)  # none, as a rule
        return units and [unit for unit in units if unit >= self._next_unit and unit not in self._in_blocks]

    def next_unit(self, in_blocks: Sequence[int] = ()) -> int:
        """The first one to launch. `in_blocks`: units that the step which is being filled computes as KV blocks."""
        return _next_of_others(self._next_unit, self._in_blocks.union(in_blocks)) if in_blocks else self._next_unit

    def units_to_score(
        self, max_tokens: int, in_blocks: Sequence[int] = (), *, at_least_one: bool = False
    ) -> tuple[int, int]:
        """first..stop of the units to launch next, within `max_tokens`. `in_blocks`: as in `next_unit`."""
        first = self.next_unit(in_blocks)
        stop = self.plan.last_unit_that_fits(first, max_tokens)
        if in_blocks or self._in_blocks:
            stop = min([stop, *(unit for unit in (*in_blocks, *self._in_blocks) if unit > first)])
        return first, max(stop, first + 1 if at_least_one else first)

    def advance(self, stop: int) -> None:
        """Units up to `stop` have been launched."""
        self._next_unit = _next_of_others(stop, self._in_blocks)

    def roll_back(self, first: int) -> None:
        """Units from `first` on must be launched again."""
        self._next_unit = _next_of_others(first, self._in_blocks)

    def advance_blocks(self, units: Sequence[int]) -> None:
        """Blocks that are these units have been launched."""
        self._in_blocks.update(units)
        self._next_unit = _next_of_others(self._next_unit, self._in_blocks)

    def roll_back_blocks(self, units: Sequence[int]) -> None:
        """The units that are blocks must be launched again."""
        self._in_blocks.difference_update(units)
        self._next_unit = min([self._next_unit, *units])

    def rows_of(self, begin: int, end: int) -> slice | Int64Array:
        """The rows of the request's outputs that are rows begin..end of this branch."""
        return slice(begin, end) if self.plan.rows is None else self.plan.rows[begin:end]

    # How far it has come

    @property
    def is_prefix_launched(self) -> bool:
        """The device has been given every block of the prefix."""
        return not self.keys or (self.entries is not None and self.num_blocks_launched == len(self.entries))

    @property
    def is_launched(self) -> bool:
        """The device has been given the whole branch."""
        return self._next_unit == self._num_units and self.is_prefix_launched

    @property
    def is_computed(self) -> bool:
        """The device has computed the whole branch."""
        if self.num_in_flight or self._next_unit < self._num_units or not self.is_reserved:
            return False
        return all(map(is_computed, self.entries or ()))


def _next_of_others(unit: int, in_blocks: Collection[int]) -> int:
    """The first unit from this one on that is not among those."""
    while unit in in_blocks:
        unit += 1
    return unit
