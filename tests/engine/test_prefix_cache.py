"""The KV cache between requests: blocks are found by their tokens, stay while in use, the oldest is evicted first."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.contract.ragged import Int32Array
from prefixwise.engine.prefix_cache import CacheEntry, PrefixCache, block_keys
from prefixwise.forward.batch import KV_BLOCK_SIZE, KVBlock
from prefixwise.plan.long_items import prefix_block_starts


@dataclass(frozen=True, eq=False)
class CountedBlock(KVBlock):
    """How often it was released."""

    releases: list[None] = field(default_factory=list)

    def release(self) -> None:
        self.releases.append(None)

    @property
    def is_released(self) -> bool:
        assert len(self.releases) <= 1, "released twice"
        return bool(self.releases)


def keys_of(*tokens: int) -> tuple[bytes, ...]:
    """One block for each of these tokens."""
    return keys_of_ids(np.repeat(np.array(tokens, np.int32), KV_BLOCK_SIZE))


def keys_of_ids(ids: Int32Array, rest_size: int = KV_BLOCK_SIZE) -> tuple[bytes, ...]:
    return block_keys(ids, prefix_block_starts(len(ids), rest_size))


def acquire(cache: PrefixCache, keys: tuple[bytes, ...], owner: object) -> list[CacheEntry]:
    entries = cache.acquire(keys, owner)
    assert entries is not None, "there is room"
    return entries


def compute(entries: list[CacheEntry]) -> None:
    """What a prefill does."""
    for entry in entries:
        if entry.block is None:
            entry.block, entry.owner = CountedBlock(KV_BLOCK_SIZE), None


def visit(cache: PrefixCache, *tokens: int) -> list[CacheEntry]:
    """A request with this prefix comes, computes what is missing and goes."""
    owner = object()
    entries = acquire(cache, keys_of(*tokens), owner)
    compute(entries)
    cache.release(entries, owner)
    return entries


def num_found(cache: PrefixCache, *tokens: int) -> int:
    """How many blocks of this prefix are there to be read."""
    owner = object()
    entries = acquire(cache, keys_of(*tokens), owner)
    ready = [entry.block is not None for entry in entries]
    cache.release(entries, owner)
    assert ready == sorted(ready, reverse=True), "a block without the one before it"
    return sum(ready)


def is_released(entry: CacheEntry) -> bool:
    assert isinstance(entry.block, CountedBlock)
    return entry.block.is_released


class TestKeys:
    def test_equal_prefixes_have_equal_keys_block_by_block(self) -> None:
        long, short = keys_of(1, 2, 3), keys_of(1, 2, 9)
        assert long[:2] == short[:2]
        assert long[2] != short[2]

    def test_an_early_token_changes_all_later_keys(self) -> None:
        ids = np.arange(3 * KV_BLOCK_SIZE, dtype=np.int32)
        changed = ids.copy()
        changed[KV_BLOCK_SIZE - 1] += 1
        assert not set(keys_of_ids(ids)) & set(keys_of_ids(changed))

    def test_the_same_tokens_at_another_place_have_another_key(self) -> None:
        assert len(set(keys_of(1, 1, 1))) == 3

    def test_a_short_last_block_is_not_the_longer_one_that_begins_with_it(self) -> None:
        ids = np.zeros(2 * KV_BLOCK_SIZE, np.int32)
        whole, short = keys_of_ids(ids), keys_of_ids(ids[: KV_BLOCK_SIZE + 7])
        assert len(whole) == len(short) == 2
        assert whole[0] == short[0]
        assert whole[1] != short[1]

    def test_blocks_that_are_cut_elsewhere_have_other_keys(self) -> None:
        ids = np.arange(KV_BLOCK_SIZE + 40, dtype=np.int32)
        whole, cut, shorter = keys_of_ids(ids), keys_of_ids(ids, 16), keys_of_ids(ids[:-7], 16)
        assert len(whole) == 2
        assert len(cut) == 1 + 3
        assert cut[:3] == shorter[:3]
        assert len({*whole, *cut, *shorter}) == 1 + 1 + 3 + 1

    @pytest.mark.parametrize(
        ("num_tokens", "num_keys"), [(0, 0), (1, 1), (KV_BLOCK_SIZE, 1), (KV_BLOCK_SIZE + 1, 2), (3 * KV_BLOCK_SIZE, 3)]
    )
    def test_there_is_one_for_every_block(self, num_tokens: int, num_keys: int) -> None:
        assert len(keys_of_ids(np.zeros(num_tokens, np.int32))) == num_keys


class TestReuse:
    def test_the_longest_known_beginning_is_found(self) -> None:
        cache = PrefixCache(10)
        visit(cache, 1, 2, 3)
        assert num_found(cache, 1, 2, 3) == 3
        assert num_found(cache, 1, 2, 4, 5) == 2
        assert num_found(cache, 2) == 0
        assert (cache.num_blocks, cache.num_used) == (3, 0)

    def test_two_requests_share_the_entries_of_what_they_have_in_common(self) -> None:
        cache = PrefixCache(10)
        first, second = acquire(cache, keys_of(1, 2), "first"), acquire(cache, keys_of(1, 3), "second")
        assert first[0] is second[0]
        assert [entry.owner for entry in (*first, second[1])] == ["first", "first", "second"]
        assert cache.num_used == 3

    def test_a_cache_that_keeps_nothing_finds_nothing_and_releases_at_once(self) -> None:
        cache = PrefixCache(10, reuse=False)
        first = acquire(cache, keys_of(1), "first")
        compute(first)
        second = acquire(cache, keys_of(1), "second")
        assert second[0] is not first[0]
        assert second[0].block is None
        cache.release(first, "first")
        assert is_released(first[0])
        cache.release(second, "second")
        assert (cache.num_blocks, cache.num_used) == (0, 0)


class TestRoom:
    def test_where_there_is_none_nothing_is_taken(self) -> None:
        cache = PrefixCache(3)
        held = acquire(cache, keys_of(1, 2), "holder")
        compute(held)
        idle = visit(cache, 7)
        assert cache.acquire(keys_of(1, 3, 4), "other") is None
        assert cache.acquire(keys_of(7, 3), "other") is None, "the idle block cannot be read and make room at once"
        assert [entry.num_users for entry in (*held, *idle)] == [1, 1, 0]
        assert (cache.num_blocks, cache.num_used) == (3, 2)
        assert not is_released(idle[0])
        assert num_found(cache, 7) == 1

    def test_blocks_in_use_take_no_room_a_second_time(self) -> None:
        cache = PrefixCache(2)
        acquire(cache, keys_of(1, 2), "first")
        assert cache.acquire(keys_of(1, 2), "second") is not None
        assert cache.acquire(keys_of(1, 3), "third") is None

    def test_the_one_idle_longest_goes_first(self) -> None:
        cache = PrefixCache(3)
        oldest, older = visit(cache, 1), visit(cache, 2)
        visit(cache, 3)
        visit(cache, 1)  # now 2 is the oldest
        visit(cache, 4)
        assert (is_released(older[0]), is_released(oldest[0])) == (True, False)
        assert cache.num_blocks == 3

    def test_a_prefix_loses_its_end_first(self) -> None:
        cache = PrefixCache(4)
        entries = visit(cache, 1, 2, 3)
        for number, left in [(10, 3), (20, 2), (30, 1)]:
            visit(cache, number)
            assert [not is_released(entry) for entry in entries].count(True) == left
            assert not is_released(entries[0])

    def test_a_beginning_stays_while_longer_prefixes_come_and_go(self) -> None:
        cache = PrefixCache(3)
        begin = visit(cache, 1)[0]
        for number in range(2, 20):
            visit(cache, 1, number)
            visit(cache, 100 + number)
        assert not is_released(begin)

    def test_what_is_in_use_is_never_given_up(self) -> None:
        cache = PrefixCache(2)
        held = acquire(cache, keys_of(1), "holder")
        compute(held)
        for number in range(2, 6):
            visit(cache, number)
        assert not is_released(held[0])
        cache.release(held, "holder")
        visit(cache, 8)
        visit(cache, 9)
        assert is_released(held[0])

    def test_a_further_user_keeps_it_when_the_first_has_gone(self) -> None:
        """As a pin does."""
        cache = PrefixCache(1)
        entries = acquire(cache, keys_of(1), "request")
        compute(entries)
        cache.share(entries)
        cache.release(entries, "request")
        assert cache.acquire(keys_of(2), "other") is None
        cache.release(entries, "pin")
        assert cache.acquire(keys_of(2), "other") is not None
        assert is_released(entries[0])


class TestOwners:
    def test_a_reserved_place_that_nobody_computed_vanishes(self) -> None:
        cache = PrefixCache(2)
        entries = acquire(cache, keys_of(1, 2), "owner")
        compute(entries[:1])
        cache.release(entries, "owner")
        assert cache.num_blocks == 1
        assert num_found(cache, 1, 2) == 1

    def test_a_place_whose_owner_has_left_is_free_for_another_that_waits(self) -> None:
        cache = PrefixCache(2)
        leaving, staying = acquire(cache, keys_of(1), "leaving"), acquire(cache, keys_of(1), "staying")
        cache.release(leaving, "leaving")
        assert (staying[0].owner, staying[0].block, cache.num_used) == (None, None, 1)

    def test_one_that_is_not_its_owner_leaves_it_to_the_owner(self) -> None:
        cache = PrefixCache(2)
        working, leaving = acquire(cache, keys_of(1), "working"), acquire(cache, keys_of(1), "leaving")
        cache.release(leaving, "leaving")
        assert working[0].owner == "working"


class TestForget:
    def test_nothing_is_found_and_idle_blocks_are_released(self) -> None:
        cache = PrefixCache(4)
        idle = visit(cache, 1)
        held = acquire(cache, keys_of(2), "holder")
        compute(held)
        cache.clear()
        assert (is_released(idle[0]), is_released(held[0])) == (True, False)
        assert (num_found(cache, 1), num_found(cache, 2)) == (0, 0)
        assert (cache.num_blocks, cache.num_used) == (1, 1)

    def test_what_was_in_use_is_released_by_its_last_user_and_not_cached(self) -> None:
        cache = PrefixCache(4)
        held = acquire(cache, keys_of(2), "holder")
        compute(held)
        cache.clear()
        again = visit(cache, 2)
        cache.release(held, "holder")
        assert (is_released(held[0]), is_released(again[0])) == (True, False)
        assert num_found(cache, 2) == 1, "the one that was computed again"
        assert cache.num_blocks == 1


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 8), reuse=st.booleans())
def test_any_order_of_events_keeps_the_cache_in_order(seed: int, capacity: int, reuse: bool) -> None:
    """Against what must hold whatever happens, with prefixes that share their beginnings."""
    chance = random.Random(seed)
    cache = PrefixCache(capacity, reuse=reuse)
    users: list[tuple[object, list[CacheEntry]]] = []
    blocks: list[CountedBlock] = []
    for _ in range(60):
        event = chance.choice(["come", "come", "compute", "compute", "share", "leave", "leave", "forget"])
        if event == "come":
            tokens = [chance.randrange(2) for _ in range(chance.randint(1, 4))]
            owner, before = object(), (cache.num_blocks, cache.num_used)
            entries = cache.acquire(keys_of(*tokens), owner)
            if entries is None:
                assert (cache.num_blocks, cache.num_used) == before
            else:
                users.append((owner, entries))
        elif event == "forget" and chance.random() < 0.2:
            cache.clear()
        elif users:
            position = chance.randrange(len(users))
            owner, entries = users[position]
            if event == "compute":  # blocks one after the other, as far as they are this user's to compute
                for entry in entries[: chance.randint(0, len(entries))]:
                    if entry.block is None:
                        if entry.owner not in (owner, None):
                            break
                        blocks.append(CountedBlock(KV_BLOCK_SIZE))
                        entry.block, entry.owner = blocks[-1], None
            elif event == "share":
                cache.share(entries)
                users.append((object(), entries))
            elif event == "leave":
                cache.release(*users.pop(position)[::-1])
        used = {entry for _, entries in users for entry in entries}
        assert cache.num_used == len(used)
        assert cache.num_used <= cache.num_blocks <= capacity
        assert all(entry.num_users == sum(each.count(entry) for _, each in users) for entry in used)
        assert not any(is_released(entry) for entry in used if entry.block is not None), "released while in use"
        held = sum(not block.is_released for block in blocks)
        assert held == cache.num_blocks - sum(entry.block is None for entry in used), "a block that nobody gives back"
    for owner, entries in users:
        cache.release(entries, owner)
    assert cache.num_used == 0
    assert reuse or all(block.is_released for block in blocks)
    cache.clear()
    assert cache.num_blocks == 0
    assert all(block.is_released for block in blocks)


@settings(max_examples=100, deadline=None)
@given(visits=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=25))
def test_no_block_outlives_the_one_before_it(visits: list[list[int]]) -> None:
    """Else it could not be found, and would only take room."""
    cache = PrefixCache(4)
    seen: dict[bytes, CacheEntry] = {}
    before: dict[bytes, bytes] = {}
    for tokens in visits:
        keys = keys_of(*tokens)
        before.update(zip(keys[1:], keys, strict=False))
        seen.update(zip(keys, visit(cache, *tokens), strict=True))
        cached = {key for key, entry in seen.items() if not is_released(entry)}
        assert len(cached) == cache.num_blocks
        assert all(before[key] in cached for key in cached if key in before)
