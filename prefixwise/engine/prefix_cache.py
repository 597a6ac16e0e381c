"""The KV cache of prefixes: KV blocks of up to KV_BLOCK_SIZE tokens that stay on the device between requests.

A block's key is a hash of its tokens and of the key before it. So a key stands for all tokens from the prefix's start,
and a lookup walks the keys of a prefix. An overridden token is hashed as its vector. Every block that a request reads
has an entry in one of these states:

    reserved   some request will compute it                 never evicted
    in use     some request reads it, or it is pinned       never evicted
    idle       no request uses it                           evicted, the least recently used first

All methods belong to the scheduler's thread unless they say otherwise. Any thread may read the counts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from time import monotonic
from uuid import uuid4

import numpy as np

from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.batch import KVBlock

Key = bytes


def block_keys(
    prefix_ids: Int32Array, starts: Sequence[int], vectors: Vectors | None = None, lora_id: int = 0
) -> tuple[Key, ...]:
    """One key per block. A block with other tokens has another key, also where it only ends elsewhere.

    `starts`: where blocks begin; at last, where the last one ends. `vectors`: of ids below 0. `lora_id`: the adapter
    that computes the blocks; 0: the model itself.
    """
    keys, before = [], b"lora %d " % lora_id if lora_id else b""
    for start, stop in pairwise(starts):
        ids = prefix_ids[start:stop]
        content = ids.tobytes() if vectors is None else _overridden_bytes(ids, vectors)
        before = blake2b(before + content, digest_size=16).digest()
        keys.append(before)
    return tuple(keys)


def _overridden_bytes(ids: Int32Array, vectors: Vectors) -> bytes:
    """The tokens, with -1 for each overridden one, and then its vectors: what decides the block's keys and values."""
    return np.maximum(ids, -1).tobytes() + vectors[~ids[ids < 0]].tobytes()


@dataclass(eq=False, slots=True)
class CacheEntry:
    """The cache's entry for one KV block."""

    key: Key
    owner: object | None = None  # the request that will compute it
    block: KVBlock | None = None  # None: not launched yet
    num_users: int = 0  # requests that read it, and pins
    is_launched: bool = False  # the device has been given it, so forwards started later may read it
    is_computed: bool = False  # the device has computed it


class PrefixCache:
    """A cache of `capacity` blocks. With `reuse` off, no other request finds a block, and its last user frees it."""

    def __init__(self, capacity: int, *, reuse: bool = True) -> None:
        self.capacity = capacity
        self.reuse = reuse
        self._by_key: dict[Key, CacheEntry] = {}
        self._idle: OrderedDict[Key, CacheEntry] = OrderedDict()  # the next one to evict first
        self._num_used = 0  # entries with users

    @property
    def num_blocks(self) -> int:
        return self._num_used + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that are reserved, read or pinned."""
        return self._num_used

    def num_found(self, keys: Sequence[Key]) -> int:
        """How many blocks from the start a lookup would find now. Any thread may call it."""
        return next((i for i, key in enumerate(keys) if key not in self._by_key), len(keys)) if self.reuse else 0

    def acquire(self, keys: Sequence[Key | None], owner: object, *, group: object = None) -> list[CacheEntry] | None:
        """An entry for every block, found or reserved for the owner. None, and nothing changed, if there is no room.

        No lookup finds a block whose key is None, and its last user frees it. With `reuse` off, owners of one `group`
        share blocks, and nobody else. The caller gives the entries back with `release`.
        """
        if not self.reuse:
            keys = [None if key is None or group is None else b"%s %d" % (key, id(group)) for key in keys]
        by_key = self._by_key
        found = [None if key is None else by_key.get(key) for key in keys]
        idle = [entry for entry in found if entry is not None and not entry.num_users]
        num_more = found.count(None) + len(idle)  # entries in use, if there is room
        if num_more > self.capacity - self._num_used:
            return None
        self._num_used += num_more
        for known in idle:
            del self._idle[known.key]
        entries = []
        for key, entry in zip(keys, found, strict=True):
            if entry is None:
                entry = CacheEntry(key or b"", owner)
                if key is not None:
                    by_key[key] = entry
            entry.num_users += 1
            entries.append(entry)
        self._evict(self.num_blocks - self.capacity)
        return entries

    def share(self, entries: Sequence[CacheEntry]) -> None:
        """Add a user to entries that have users."""
        for entry in entries:
            entry.num_users += 1

    def release(self, entries: Sequence[CacheEntry], owner: object) -> None:
        """Remove a user, the last block first, so that a prefix loses its end before its beginning. A block without
        users becomes idle, if a lookup would find it, or is freed."""
        for entry in reversed(entries):
            if entry.owner is owner:
                entry.owner = None
            entry.num_users -= 1
            if entry.num_users:
                continue
            self._num_used -= 1
            is_known = self._by_key.get(entry.key) is entry
            if is_known and self.reuse and entry.block is not None:
                self._idle[entry.key] = entry
                continue
            if is_known:
                del self._by_key[entry.key]
            if entry.block is not None:
                entry.block.release()

    def forget(self, entries: Sequence[CacheEntry]) -> None:
        """No lookup finds these entries any more. Their users keep them, and the last one frees them."""
        for entry in entries:
            if self._by_key.get(entry.key) is entry:
                del self._by_key[entry.key]

    def _evict(self, count: int) -> None:
        for _ in range(count):
            key, entry = self._idle.popitem(last=False)
            del self._by_key[key]
            assert entry.block is not None, "an idle entry has a block"
            entry.block.release()

    def clear(self) -> None:
        """After a device failure: drop every block, as none can be trusted. Entries in use are released by their users,
        and no lookup finds them again."""
        self._by_key.clear()
        for entry in self._idle.values():
            if entry.block is not None:
                entry.block.release()
        self._idle.clear()


@dataclass(frozen=True)
class PinnedPrefix:
    """A pinned prefix, as reported to the caller."""

    id: str
    num_tokens: int
    cached_tokens: int  # of these, cache hits
    num_bytes: int
    ttl_seconds: float


@dataclass(frozen=True)
class _Pin:
    prefix: PinnedPrefix
    entries: tuple[CacheEntry, ...]
    expires: float  # a value of time.monotonic(); 0.0: the caller has released it


class Pins:
    """Prefixes that stay in the KV cache until they expire or the caller releases them.

    Pins leave room for the longest prefix, or half of the cache if that is less. If a request needs more, the scheduler
    evicts pins (`evict_oldest`).
    """

    def __init__(self, cache: PrefixCache, longest_prefix_blocks: int) -> None:
        self._cache = cache
        self._max_blocks = max(cache.capacity - longest_prefix_blocks, cache.capacity // 2)
        self._pins: dict[str, _Pin] = {}
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Pinned blocks. A block counts once for every pin on it."""
        return sum(len(pin.entries) for pin in list(self._pins.values()))

    def check_room(self, num_blocks: int) -> None:
        """Raises InvalidValueError (`prefix_cache_full`)."""
        if self.num_blocks + num_blocks > self._max_blocks:
            raise InvalidValueError(
                f"pinned prefixes may take at most {self._max_blocks} blocks, {self.num_blocks} are pinned and this "
                f"prefix has {num_blocks}; release one, or give prefixes more memory (prefix_cache_bytes)",
                code="prefix_cache_full",
                param="query",
            )

    def add(self, entries: Sequence[CacheEntry], tokens: tuple[int, int], block_bytes: int, ttl: float) -> PinnedPrefix:
        """Pin these entries for `ttl` seconds. `tokens`: of the prefix, and those of them that were cache hits."""
        self.check_room(len(entries))
        self._cache.share(entries)
        prefix = PinnedPrefix(uuid4().hex, tokens[0], tokens[1], len(entries) * block_bytes, ttl)
        with self._lock:
            self._pins[prefix.id] = _Pin(prefix, tuple(entries), monotonic() + ttl)
        return prefix

    def unpin(self, prefix_id: str) -> bool:
        """Let the pin expire now. False if no pin has this id. Any thread may call this."""
        with self._lock:
            pin = self._pins.get(prefix_id)
            if pin is None or not pin.expires:
                return False
            self._pins[prefix_id] = replace(pin, expires=0.0)
            return True

    def release_expired(self) -> float | None:
        """Release the pins that have expired. Returns the seconds until the next one expires; None: there is none."""
        if not self._pins:
            return None
        now = monotonic()
        with self._lock:
            expired = [self._pins.pop(pin.prefix.id) for pin in list(self._pins.values()) if pin.expires <= now]
        self._release(expired)
        if not self._pins:
            return None
        return max(0.0, min(pin.expires for pin in self._pins.values()) - now)  # one may just have been unpinned

    def evict_oldest(self) -> bool:
        """Release the oldest pin. False if there is none."""
        with self._lock:
            pin = self._pins.pop(next(iter(self._pins))) if self._pins else None
        self._release([] if pin is None else [pin])
        return pin is not None

    def release_all(self) -> None:
        with self._lock:
            pins = list(self._pins.values())
            self._pins.clear()
        self._release(pins)

    def _release(self, pins: Sequence[_Pin]) -> None:
        for pin in pins:
            self._cache.release(pin.entries, pin)

    def listed(self) -> list[PinnedPrefix]:
        """All pinned prefixes. Any thread may call this."""
        with self._lock:
            return [pin.prefix for pin in self._pins.values() if pin.expires]
