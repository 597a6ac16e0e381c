"""A replica: a queue, the product's cache of prefixes, and a device that takes its time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from benchmarks.cluster_simulation.device import Device
from benchmarks.cluster_simulation.traffic import QueryBlocks, Request, Traffic
from prefixwise.engine.prefix_cache import CacheEntry, PrefixCache
from prefixwise.forward.batch import KV_BLOCK_SIZE, KVBlock


@dataclass(frozen=True, eq=False)
class KeptBlock(KVBlock):
    """Keys and values that are nowhere."""

    num_tokens: int = KV_BLOCK_SIZE


@dataclass(eq=False)
class Work:
    """What is left of a request."""

    request: Request
    prefix_tokens: int
    item_tokens: int
    entries: list[CacheEntry] | None = None  # None: its turn has not come

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + self.item_tokens


class Replica:
    """Steps are filled from its queue, oldest first."""

    def __init__(self, name: str, device: Device, traffic: Traffic, blocks: QueryBlocks) -> None:
        self.name = name
        self.queued_tokens = 0  # to be computed here
        self.busy_seconds = 0.0
        self.cache = PrefixCache(device.cache_blocks)
        self.queue: deque[Work] = deque()
        self._running: list[Work] = []  # those that the running step ends
        self._running_tokens = 0
        self._device = device
        self._traffic = traffic
        self._blocks = blocks

    def take(self, request: Request) -> None:
        """Into the queue. What may be found in the cache is known when its turn comes."""
        work = Work(request, self._traffic.query_tokens, self._traffic.request_item_tokens)
        self.queue.append(work)
        self.queued_tokens += work.tokens

    def begin_step(self) -> float | None:
        """How long it takes; None where there is nothing to do."""
        left, prefix_tokens = self._device.step_tokens, 0
        while self.queue and left and self._look_up(self.queue[0]):
            work = self.queue[0]
            taken = min(left, work.prefix_tokens)
            work.prefix_tokens -= taken
            prefix_tokens += taken
            left -= taken
            if not work.prefix_tokens:
                self._keep(work)
            taken = min(left, work.item_tokens)
            work.item_tokens -= taken
            left -= taken
            if not work.tokens:
                self._running.append(self.queue.popleft())
        self._running_tokens = self._device.step_tokens - left
        if not self._running_tokens:
            return None
        seconds = self._device.seconds(prefix_tokens, self._running_tokens - prefix_tokens)
        self.busy_seconds += seconds
        return seconds

    def end_step(self) -> list[Request]:
        """Those that it has answered."""
        self.queued_tokens -= self._running_tokens
        done, self._running = self._running, []
        for work in done:
            assert work.entries is not None
            self.cache.release(work.entries, work)
        return [work.request for work in done]

    def lose(self) -> list[Request]:
        """All that was here, of a replica that has died."""
        return [work.request for work in (*self._running, *self.queue)]

    def _look_up(self, work: Work) -> bool:
        """Is there room for its prefix? What is found need not be computed."""
        if work.entries is not None:
            return True
        work.entries = self.cache.acquire(self._blocks.keys(work.request.query), work)
        if work.entries is None:
            return False
        num_new = sum(entry.owner is work for entry in work.entries)
        found = work.prefix_tokens - min(num_new * KV_BLOCK_SIZE, work.prefix_tokens)
        work.prefix_tokens -= found
        work.request.hit_tokens = found
        self.queued_tokens -= found
        return True

    @staticmethod
    def _keep(work: Work) -> None:
        for entry in work.entries or ():
            if entry.owner is work and entry.block is None:
                entry.block = KeptBlock()
