"""The measured token rate: how many tokens the device computes per second while it has enough to do."""

from __future__ import annotations

import math

AVERAGE_SECONDS = 10.0  # the rate is averaged over this long
FORGET_SECONDS = 60.0  # a rate is unknown again if no step has confirmed it for this long
MAX_CHANGE = 4.0  # a step counts as at most this many times slower than the average: it may have waited for a compiler


class TokenRate:
    """Learns the rate from steps. `now` is a value of time.monotonic().

    A small step says little: its fixed costs outweigh its tokens. So steps below `least_tokens` count only if they are
    faster than the average. (TCP BBR treats samples of a sender without data in the same way.) A rate that nothing has
    confirmed for a while is forgotten, else a slow minute could make the server refuse for ever what it never tries.
    """

    def __init__(self, least_tokens: int) -> None:
        self.least_tokens = least_tokens
        self._tokens = self._seconds = 0.0  # of the last steps, the newest with the greatest weight
        self._average = 0.0
        self._confirmed = -math.inf

    def at(self, now: float) -> float | None:
        """Tokens per second; None: unknown. Any thread may call it."""
        return self._average if now - self._confirmed <= FORGET_SECONDS else None

    def record(self, tokens: int, seconds: float, now: float) -> None:
        """A step has computed so many tokens, `seconds` after the one before it, or after it could begin."""
        seconds = max(seconds, 1e-6)
        known = self.at(now)
        if tokens < self.least_tokens and (known is None or tokens <= known * seconds):
            return
        if known is None or tokens > MAX_CHANGE * known * seconds:  # the steps before were the exception
            self._tokens = self._seconds = 0.0
        else:
            seconds = min(seconds, MAX_CHANGE * tokens / known)
        weight = math.exp(-seconds / AVERAGE_SECONDS)
        self._tokens = weight * self._tokens + tokens
        self._seconds = weight * self._seconds + seconds
        self._average = self._tokens / self._seconds
        self._confirmed = now
