"""Admission: which requests may wait, and when a client should retry if there are too many.

Two limits. `max_tokens` bounds the tokens that wait or run. And no request is admitted that would miss its deadline at
the measured rate (`token_rate.py`). Until a rate is known, the first limit counts alone; requests without a deadline
have no other.

The estimate follows the scheduler's fairness (`step_filler.py`): lines of requests take turns, of a share of a step
for each request.

    until its end   a request waits for all that is before it in its line, for as many turns of every other line, and
                    for all of an earlier priority. So a small request passes a large one here, too.
    available       smaller requests that come later pass it as well. What they took of the rate in the last seconds is
                    not available to it. The requests of one call come together, so they count as the largest of them.
    allowed         what others have until its end may take `MAX_WAIT` of its time, all together `MAX_TIME`.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import QueueFullError, RequestTooLargeError
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.step_limits import SHARES
from prefixwise.engine.token_rate import AVERAGE_SECONDS, TokenRate
from prefixwise.forward.backend import DeviceKind

# The default: about as many tokens as a device computes in a few minutes.
DEFAULT_MAX_QUEUED_TOKENS: dict[DeviceKind, int] = {"cpu": 1 << 18, "gpu": 1 << 23, "tpu": 1 << 23}

MAX_WAIT = 0.4
MAX_TIME = 0.9  # the answer takes time, too
GIVE_UP = 1.25  # a request is given up if it needs so many times the time that it has left
MAX_COMPARED = 1024  # beyond so many live requests, a new one is taken to wait for all of them

_MAX_RETRY_SECONDS = 60  # the longest wait that a client is asked for
_NUM_SIZES = 32
_LEAST_AVAILABLE = 0.01  # of the rate


class Admission:
    """Counts tokens from the submission of a request until they are computed. Any thread may use it."""

    def __init__(self, max_tokens: int, step_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.refusals: Counter[str] = Counter()  # by the error's code
        self._step_tokens = step_tokens
        self.turn_tokens = max(1, step_tokens // SHARES)  # most that a request gets in one turn
        self._lock = threading.Lock()
        self._tokens = 0
        self._rate = TokenRate(self.turn_tokens)
        self._last = monotonic()  # when the last step was done, or the queue was empty
        self._live: dict[RequestState, None] = {}  # in the order of their arrival
        self._inflow = [0.0] * _NUM_SIZES  # tokens per second that were admitted, by size
        self._inflow_time = self._last

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def is_full(self) -> bool:
        return self._tokens >= self.max_tokens

    @property
    def tokens_per_second(self) -> float | None:
        """The measured rate; None: unknown."""
        return self._rate.at(monotonic())

    def resize_steps(self, step_tokens: int, turn_tokens: int) -> None:
        """Steps, and the turns of requests, have at most so many tokens from now on."""
        with self._lock:
            self._step_tokens, self.turn_tokens = step_tokens, turn_tokens
            self._rate.least_tokens = turn_tokens

    def check(self) -> None:
        """Raises QueueFullError if no request could be admitted, so that the server need not read a body."""
        if self.is_full:
            raise self._counted(self._full(0))

    def refusal_if_full(self) -> QueueFullError | None:
        """The refusal that `check` would raise now, for workers that ask later. Counts nothing."""
        return self._full(0) if self.is_full else None

    def admit(self, requests: Sequence[RequestState]) -> None:
        """Admit all of them or none. Requests that are larger than `max_tokens` are admitted if nothing else waits.

        Raises QueueFullError, and RequestTooLargeError if they could not meet their deadline on an idle device.
        """
        tokens = sum(request.task.num_tokens for request in requests)
        with self._lock:
            now = monotonic()
            if self._tokens and self._tokens + tokens > self.max_tokens:
                raise self._counted(self._full(tokens))
            self._age_inflow(now)
            for request in requests:
                request.size = self._size_of(request)
            self._check_deadline(requests, now)
            if not self._tokens:
                self._last = now  # the time before was idle
            self._tokens += tokens
            size = max((request.size for request in requests), default=0)
            for request in requests:
                self._live[request] = None
                request.call_size = size
                self._inflow[size] += request.work_left / AVERAGE_SECONDS

    def count_step(self, tokens: int) -> None:
        """A step has computed these tokens."""
        with self._lock:
            now = monotonic()
            self._tokens -= tokens
            self._rate.record(tokens, now - self._last, now)
            self._last = now

    def restore(self, tokens: int) -> None:
        """These tokens must be computed again."""
        with self._lock:
            self._tokens += tokens

    def leave(self, request: RequestState) -> None:
        """The request is done, or will not be."""
        with self._lock:
            self._live.pop(request, None)
            self._tokens -= request.tokens_left
            if request.work_left:  # a client that leaves has taken nothing from others
                now = monotonic()
                self._age_inflow(now)
                left = math.exp(-(now - request.submitted) / AVERAGE_SECONDS) * request.work_left / AVERAGE_SECONDS
                self._inflow[request.call_size] = max(0.0, self._inflow[request.call_size] - left)

    def at_risk_until(self, now: float) -> float:
        """No admitted request with a later deadline than this is late (`why_late`), or past it."""
        rate = self._rate.at(now)
        return now if rate is None else now + self._tokens / self._available(rate, _NUM_SIZES)

    def why_late(self, request: RequestState, now: float) -> str | None:
        """Why an admitted request cannot meet its deadline any more, if that is so: device time for it would be lost.

        It needs at least the time of its own work, or of the step that it shares.
        """
        rate, deadline = self._rate.at(now), request.task.deadline
        if rate is None or deadline is None:
            return None
        tokens, seconds = max(request.work_left, min(self._step_tokens, self._tokens)), deadline - now
        if not request.has_begun:
            rate = self._available(rate, request.size)
        if tokens <= (GIVE_UP if request.has_begun else 1.0) * rate * seconds:
            return None
        return (
            f"the request was given up {seconds:.3g} s before its deadline: {tokens} tokens had to be computed until "
            f"its end, which takes {tokens / rate:.3g} s at {rate:.0f} tokens/s"
        )

    # Deadlines

    def _check_deadline(self, requests: Sequence[RequestState], now: float) -> None:
        """Raises QueueFullError or RequestTooLargeError if the requests would not be done in time."""
        rate = self._rate.at(now)
        seconds = min((each.task.deadline - now for each in requests if each.task.deadline is not None), default=0.0)
        if rate is None or seconds <= 0:  # without a deadline, or past it: the scheduler ends it
            return
        work, size = sum(request.work_left for request in requests), max(request.size for request in requests)
        if work > MAX_TIME * rate * seconds:
            raise self._too_large(work, rate, seconds)
        available = self._available(rate, size)
        allowed = min(MAX_WAIT * seconds * available + work, MAX_TIME * seconds * available)
        until_end = self._tokens + work  # a bound that costs nothing
        if until_end > allowed and len(self._live) + len(requests) <= MAX_COMPARED:
            until_end = self._until_end(requests)
        if until_end > allowed:
            raise self._counted(self._too_slow(until_end, available, allowed / available))

    def _until_end(self, requests: Sequence[RequestState]) -> int:
        """The tokens that are computed until the last of the requests is done, and what else is in its last step."""
        everyone = [*self._live, *requests]
        work = np.array([each.work_left for each in everyone], np.int64)
        lines = np.array([(each.task.priority, each.size) for each in everyone], np.int64)
        longest_turn = max(self.turn_tokens, *(each.task.max_unit_tokens for each in everyone))
        last_in_line = {(each.task.priority, each.size) for each in requests}
        until_end = max(tokens_before_end(*line, work, lines, self.turn_tokens, longest_turn) for line in last_in_line)
        return min(until_end + self._step_tokens, int(work.sum()))

    def _available(self, rate: float, size: int) -> float:
        """What smaller requests leave of the rate."""
        return max(rate - sum(self._inflow[:size]), _LEAST_AVAILABLE * rate)

    def _size_of(self, request: RequestState) -> int:
        """0: one turn; 1: two; 2: up to four; 3: up to eight; and so on."""
        num_turns = -(-request.work_left // self.turn_tokens)
        return min(max(0, num_turns - 1).bit_length(), _NUM_SIZES - 1)

    def _age_inflow(self, now: float) -> None:
        weight = math.exp(-(now - self._inflow_time) / AVERAGE_SECONDS)
        self._inflow = [weight * tokens for tokens in self._inflow]
        self._inflow_time = now

    # Refusals

    def _full(self, tokens: int) -> QueueFullError:
        rate, excess = self._rate.at(monotonic()), self._tokens + tokens - self.max_tokens
        needed = f" and this request has {tokens}" if tokens else ""
        message = (
            f"at most {self.max_tokens} tokens may wait (max_queued_tokens), {self._tokens} are waiting{needed}; "
            "retry later"
        )
        return self._refusal(message, excess / rate if rate else 1.0, code="queue_full")

    def _too_slow(self, tokens: int, available: float, allowed: float) -> QueueFullError:
        seconds = tokens / available
        message = (
            f"the work until the end of this request may take {allowed:.3g} s, so that its deadline is met; it takes "
            f"{seconds:.3g} s: {tokens} tokens at {available:.0f} tokens/s; retry later"
        )
        return self._refusal(message, seconds - allowed, code="queue_too_long")

    def _counted(self, error: QueueFullError) -> QueueFullError:
        self.refusals[error.code] += 1
        return error

    def _refusal(self, message: str, seconds: float, *, code: str) -> QueueFullError:
        return QueueFullError(message, code=code, retry_after=min(max(math.ceil(seconds), 1), _MAX_RETRY_SECONDS))

    def _too_large(self, tokens: int, rate: float, seconds: float) -> RequestTooLargeError:
        message = (
            f"the request must be computed in {MAX_TIME * seconds:.3g} s, so that its deadline is met; alone on the "
            f"device it takes {tokens / rate:.3g} s: {tokens} tokens at {rate:.0f} tokens/s; allow more time, or send "
            "fewer items in a request"
        )
        error = RequestTooLargeError(message, code="deadline_too_short")
        self.refusals[error.code] += 1
        return error


def tokens_before_end(
    priority: int, size: int, work: NDArray[np.int64], lines: NDArray[np.int64], turn: int, longest_turn: int
) -> int:
    """Tokens of `work` that are computed until the last request of this line is done, if no other comes.

    `lines` are [priority, size] of each request, in the order of their arrival. Those of size 0 have a line each. The
    line gets turns of at least `turn`, the others of at most `longest_turn`.
    """
    before = work[lines[:, 0] < priority].sum()
    is_beside = lines[:, 0] == priority
    of_size = {int(each): work[is_beside & (lines[:, 1] == each)] for each in np.unique(lines[is_beside, 1])}
    own = of_size.pop(size)
    num_rounds = 1
    if size:
        num_left = np.arange(len(own), 0, -1)  # in the line, while each is served
        num_rounds = int(np.ceil(own / (turn * np.minimum(num_left, SHARES))).sum())
    beside = 0
    for each, others in of_size.items():
        most = num_rounds * longest_turn
        beside += int(
            np.minimum(others, most).sum() if not each else min(others.sum(), most * min(len(others), SHARES))
        )
    return int(before + own.sum()) + beside
