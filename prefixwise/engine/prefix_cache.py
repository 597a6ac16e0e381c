"""Keys and values of prefixes, kept between requests in blocks of KV_BLOCK_SIZE tokens.

A block's key is a hash of its tokens and of the key before it, so a key stands for all tokens from the prefix's start,
and a prefix is found by walking its keys. A place is taken for every block that a request reads:

    reserved   somebody is to compute it                    never evicted
    in use     some request reads it, or it is pinned       never evicted
    idle       nobody does; the one idle longest goes first when room is needed

All methods belong to the scheduler's thread; the figures may be read from any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.batch import KV_BLOCK_SIZE, KVBlock

Key = bytes


def block_keys(prefix_ids: Int32Array) -> tuple[Key, ...]:
    """One key per block; the last block may be short, and its key says so by what it hashes."""
    keys, before = [], b""
    data = prefix_ids.tobytes()
    size = KV_BLOCK_SIZE * prefix_ids.itemsize
    for start in range(0, len(data), size):
        before = blake2b(before + data[start : start + size], digest_size=16).digest()
        keys.append(before)
    return tuple(keys)


@dataclass(eq=False)
class CacheEntry:
    """A place in the cache."""

    key: Key
    block: KVBlock | None = None  # None: nothing is there yet
    num_users: int = 0  # requests that read it, and pins
    owner: object | None = None  # who is to compute it
    is_started: bool = False  # has the device been told to? Then whatever it is told later may read the block
    is_computed: bool = False  # has the device done it?


class PrefixCache:
    """`capacity` blocks. With `keeps` off a block goes as soon as its last user has gone, and nobody finds it."""

    def __init__(self, capacity: int, *, keeps: bool = True) -> None:
        self.capacity = capacity
        self.keeps = keeps
        self._found: dict[Key, CacheEntry] = {}
        self._idle: OrderedDict[Key, CacheEntry] = OrderedDict()  # the one that is to go first comes first
        self._num_used = 0  # entries with users

    @property
    def num_blocks(self) -> int:
        return self._num_used + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that are reserved, read or pinned."""
        return self._num_used

    def acquire(self, keys: Sequence[Key], owner: object) -> list[CacheEntry] | None:
        """An entry for every block, found or reserved for the owner; None, and nothing taken, where there is no room.

        The caller gives them back with `release`.
        """
        found = [self._found.get(key) if self.keeps else None for key in keys]
        num_new = sum(entry is None for entry in found)
        num_woken = sum(entry is not None and not entry.num_users for entry in found)
        if num_new > self.capacity - self._num_used - num_woken:
            return None
        entries = [self._take(key, entry, owner) for key, entry in zip(keys, found, strict=True)]
        while self.num_blocks > self.capacity:
            self._evict()
        return entries

    def _take(self, key: Key, entry: CacheEntry | None, owner: object) -> CacheEntry:
        if entry is None:
            entry = CacheEntry(key, owner=owner)
            if self.keeps:
                self._found[key] = entry
        if not entry.num_users:
            self._idle.pop(key, None)
            self._num_used += 1
        entry.num_users += 1
        return entry

    def share(self, entries: Sequence[CacheEntry]) -> None:
        """One more user for entries that have users."""
        for entry in entries:
            entry.num_users += 1

    def release(self, entries: Sequence[CacheEntry], owner: object) -> None:
        """The last block first, so that a prefix loses its end before its beginning."""
        for entry in reversed(entries):
            if entry.owner is owner:
                entry.owner = None
            entry.num_users -= 1
            if not entry.num_users:
                self._num_used -= 1
                self._retire(entry)

    def _retire(self, entry: CacheEntry) -> None:
        """Nobody uses it any more."""
        if self._found.get(entry.key) is entry and entry.block is not None:
            self._idle[entry.key] = entry
            return
        if self._found.get(entry.key) is entry:
            del self._found[entry.key]  # it was never computed
        if entry.block is not None:
            entry.block.release()

    def _evict(self) -> None:
        key, entry = self._idle.popitem(last=False)
        del self._found[key]
        assert entry.block is not None, "what is idle has been computed"
        entry.block.release()

    def forget(self) -> None:
        """After a failure of the device: nothing that is here can be trusted. Entries in use are still to be released,
        and nobody finds them again."""
        self._found.clear()
        for entry in self._idle.values():
            if entry.block is not None:
                entry.block.release()
        self._idle.clear()
