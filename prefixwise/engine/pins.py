"""Pinned prefixes: kept until their time is over or somebody releases them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from uuid import uuid4

from prefixwise.contract.errors import InvalidValueError
from prefixwise.engine.prefix_cache import CacheEntry, PrefixCache


@dataclass(frozen=True)
class PinnedPrefix:
    """What the caller is told."""

    id: str
    num_tokens: int
    cached_tokens: int  # of these, computed before
    num_bytes: int
    ttl_seconds: float


@dataclass(frozen=True)
class _Pin:
    prefix: PinnedPrefix
    entries: tuple[CacheEntry, ...]
    expires: float  # of time.monotonic()


class Pins:
    """For the scheduler's thread, but for `end` and `listed`.

    Pins leave room for the longest prefix, or half of the cache where that is smaller. A request that needs even that
    makes them go (`give_up_one`).
    """

    def __init__(self, cache: PrefixCache, longest_prefix_blocks: int) -> None:
        self._cache = cache
        self._max_blocks = max(cache.capacity - longest_prefix_blocks, cache.capacity // 2)
        self._pins: dict[str, _Pin] = {}
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """A block counts once for every pin on it."""
        return sum(len(pin.entries) for pin in list(self._pins.values()))

    def check_room(self, num_blocks: int) -> None:
        """Raises prefix_cache_full."""
        if self.num_blocks + num_blocks > self._max_blocks:
            raise InvalidValueError(
                f"pinned prefixes may take at most {self._max_blocks} blocks, {self.num_blocks} are pinned and this "
                f"prefix has {num_blocks}; release one, or give prefixes more memory (prefix_cache_bytes)",
                code="prefix_cache_full",
                param="query",
            )

    def add(self, entries: Sequence[CacheEntry], tokens: tuple[int, int], block_bytes: int, ttl: float) -> PinnedPrefix:
        """Keep these entries for `ttl` seconds. `tokens`: of the prefix, and those of them that were kept before."""
        self.check_room(len(entries))
        self._cache.share(entries)
        prefix = PinnedPrefix(uuid4().hex, tokens[0], tokens[1], len(entries) * block_bytes, ttl)
        with self._lock:
            self._pins[prefix.id] = _Pin(prefix, tuple(entries), monotonic() + ttl)
        return prefix

    def end(self, prefix_id: str) -> bool:
        """Let its time be over now; False where there is none of this id. For any thread."""
        with self._lock:
            pin = self._pins.get(prefix_id)
            if pin is None or not pin.expires:
                return False
            self._pins[prefix_id] = replace(pin, expires=0.0)
            return True

    def expire(self) -> float | None:
        """Release those whose time is over; seconds until the next one's is."""
        if not self._pins:
            return None
        now = monotonic()
        with self._lock:
            over = [self._pins.pop(pin.prefix.id) for pin in list(self._pins.values()) if pin.expires <= now]
        self._release(over)
        if not self._pins:
            return None
        return max(0.0, min(pin.expires for pin in self._pins.values()) - now)  # one may just have been ended

    def give_up_one(self) -> bool:
        """Release the oldest; False where there is none."""
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
        """For any thread."""
        with self._lock:
            return [pin.prefix for pin in self._pins.values() if pin.expires]
