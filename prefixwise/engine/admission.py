"""Admission: how many tokens may be waiting or running, and when to come again where there are too many."""

from __future__ import annotations

import math
import threading
from time import monotonic

from prefixwise.contract.errors import QueueFullError
from prefixwise.forward.backend import DeviceKind

# Where the user leaves it open: about as many tokens as a device computes in a few minutes.
DEFAULT_MAX_QUEUED_TOKENS: dict[DeviceKind, int] = {"cpu": 1 << 18, "gpu": 1 << 23, "tpu": 1 << 23}

_LONGEST_WAIT = 60  # seconds that a client is told to wait, at most
_MEMORY_SECONDS = 10.0  # over how long the rate of tokens is averaged


class Admission:
    """Counts tokens from when a request is taken in until they are computed. For any thread."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._lock = threading.Lock()
        self._tokens = 0
        self._rate = 0.0  # tokens per second
        self._last = monotonic()

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def is_full(self) -> bool:
        return self._tokens >= self.max_tokens

    def check(self) -> None:
        """Raises QueueFullError where nothing would be taken in, so that a body need not even be read."""
        if self.is_full:
            raise self._refusal(0)

    def admit(self, tokens: int) -> None:
        """Take a request in. One that is larger than the bound is taken where nothing else is waiting."""
        with self._lock:
            if self._tokens and self._tokens + tokens > self.max_tokens:
                raise self._refusal(tokens)
            if not self._tokens:
                self._last = monotonic()  # what came before was idleness
            self._tokens += tokens

    def done(self, tokens: int, *, computed: bool = True) -> None:
        """So many tokens are computed, or will not be."""
        with self._lock:
            self._tokens -= tokens
            if computed and tokens:
                self._measure(tokens)

    def forget_rate(self) -> None:
        """What has been measured so far was no traffic."""
        with self._lock:
            self._rate = 0.0

    def _measure(self, tokens: int) -> None:
        now = monotonic()
        seconds = max(now - self._last, 1e-6)
        weight = -math.expm1(-seconds / _MEMORY_SECONDS) if self._rate else 1.0
        self._rate += weight * (tokens / seconds - self._rate)
        self._last = now

    def _refusal(self, tokens: int) -> QueueFullError:
        excess = self._tokens + tokens - self.max_tokens
        wait = math.ceil(excess / self._rate) if self._rate else 1
        needed = f" and this request has {tokens}" if tokens else ""
        return QueueFullError(
            f"at most {self.max_tokens} tokens may wait (max_queued_tokens), {self._tokens} are waiting{needed}; "
            "come again later",
            retry_after=min(max(wait, 1), _LONGEST_WAIT),
        )
