"""Admission: how many tokens may wait or run, and when a client should retry if there are too many."""

from __future__ import annotations

import math
import threading
from time import monotonic

from prefixwise.contract.errors import QueueFullError
from prefixwise.forward.backend import DeviceKind

# The default: about as many tokens as a device computes in a few minutes.
DEFAULT_MAX_QUEUED_TOKENS: dict[DeviceKind, int] = {"cpu": 1 << 18, "gpu": 1 << 23, "tpu": 1 << 23}

_MAX_RETRY_SECONDS = 60  # the longest wait that a client is asked for
_AVERAGE_SECONDS = 10.0  # the token rate is averaged over this long


class Admission:
    """Counts tokens from the submission of a request until they are computed. Any thread may use it."""

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
        """Raises QueueFullError if no request could be admitted, so that the server need not read a body."""
        if self.is_full:
            raise self._refusal(0)

    def admit(self, tokens: int) -> None:
        """Admit a request, also one that is larger than the bound if nothing else waits. Raises QueueFullError."""
        with self._lock:
            if self._tokens and self._tokens + tokens > self.max_tokens:
                raise self._refusal(tokens)
            if not self._tokens:
                self._last = monotonic()  # the time before was idle
            self._tokens += tokens

    def release(self, tokens: int, *, computed: bool = True) -> None:
        """These tokens are computed, or will not be."""
        with self._lock:
            self._tokens -= tokens
            if computed and tokens:
                self._measure(tokens)

    def reset_rate(self) -> None:
        """Forget the measured rate, as after warm-up, which is no traffic."""
        with self._lock:
            self._rate = 0.0

    def _measure(self, tokens: int) -> None:
        now = monotonic()
        seconds = max(now - self._last, 1e-6)
        weight = -math.expm1(-seconds / _AVERAGE_SECONDS) if self._rate else 1.0
        self._rate += weight * (tokens / seconds - self._rate)
        self._last = now

    def _refusal(self, tokens: int) -> QueueFullError:
        excess = self._tokens + tokens - self.max_tokens
        wait = math.ceil(excess / self._rate) if self._rate else 1
        needed = f" and this request has {tokens}" if tokens else ""
        return QueueFullError(
            f"at most {self.max_tokens} tokens may wait (max_queued_tokens), {self._tokens} are waiting{needed}; "
            "retry later",
            retry_after=min(max(wait, 1), _MAX_RETRY_SECONDS),
        )
