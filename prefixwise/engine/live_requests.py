"""The live requests: those that the scheduler has received and not ended, and how each of them ends.

computed     with its result
cancelled    once no step with a part of it is in flight; no further step is filled from it
expired      the same, after its deadline
shed         the same, before its deadline, which it cannot meet any more
closing      if it has not been started
failed       with the error of its own step (`recovery.py`) or of the whole engine (`health.py`)
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from time import monotonic

from prefixwise.contract.errors import BackendError, CancelledError, DeadlineExceededError, RequestError
from prefixwise.engine.admission import Admission
from prefixwise.engine.health import EngineHealth, EngineState
from prefixwise.engine.prefix_cache import Pins, PrefixCache
from prefixwise.engine.request_state import Line, RequestState
from prefixwise.engine.stats import Counters


class LiveRequests:
    """In lines, which take turns (`step_filler.py`). The scheduler's thread owns it; any may iterate."""

    def __init__(
        self,
        cache: PrefixCache,
        pins: Pins,
        admission: Admission,
        health: EngineHealth,
        counters: Counters,
        closing: threading.Event,
        block_bytes: int,  # of a KV block
    ) -> None:
        self._cache = cache
        self._pins = pins
        self._admission = admission
        self._health = health
        self._counters = counters
        self._closing = closing
        self._block_bytes = block_bytes
        self._requests: dict[RequestState, None] = {}
        self._lines: dict[Line, None] = {}  # the longest unserved first
        self._shared: dict[tuple[int, int], Line] = {}  # by priority and size

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        """Over a copy, so that requests may come and go meanwhile."""
        return iter(list(self._requests))

    def add(self, request: RequestState) -> None:
        self._requests[request] = None
        if request.size:
            request.line = self._shared.setdefault((request.task.priority, request.size), request.line)
        request.line.requests[request] = None
        self._lines[request.line] = None
        if request.task.pin_seconds is not None:
            try:
                self._pins.check_room(len(request.keys))
            except RequestError as error:
                self.end(request, error)

    def end_turn(self, line: Line) -> None:
        """The next turns are those of all other lines."""
        del self._lines[line]
        self._lines[line] = None

    def begin(self, request: RequestState, now: float) -> None:
        """A part of the request is launched, perhaps the first."""
        if request.started is None:
            request.started = now
            self._counters.prefix_queried_tokens += len(request.task.prefix_ids)
            self._counters.prefix_hit_tokens += request.cached_tokens

    # Ends before the result

    def drop_expired(self) -> bool:
        """End requests that are cancelled or past their deadline; those in flight, when their step is done. True if
        there are any: a step that was filled ahead may hold parts of them."""
        now, found = monotonic(), False
        for request in self._at_risk(now):
            error = self._end_reason(request, now)
            if error is not None:
                found = True
                if not request.num_in_flight:
                    is_late = isinstance(error, DeadlineExceededError)
                    self._counters.shed_requests += is_late and not request.has_expired(now)
                    self.end(request, error)
        return found

    def unlaunched(self) -> list[RequestState]:
        """Those that the next step may serve, line by line."""
        now = monotonic()
        ending = {request for request in self._at_risk(now) if request.num_in_flight and self._end_reason(request, now)}
        return [
            request
            for line in self._lines
            for request in line.requests
            if not request.is_launched and request not in ending
        ]

    def _at_risk(self, now: float) -> list[RequestState]:
        """The requests that `_end_reason` may end: seldom any, so that a look at each costs little."""
        if self._closing.is_set() or self._health.state is not EngineState.OK:
            return list(self._requests)
        until = self._admission.at_risk_until(now)
        return [
            request
            for request in self._requests
            if request.is_cancelled or ((deadline := request.task.deadline) is not None and deadline <= until)
        ]

    def _end_reason(self, request: RequestState, now: float) -> Exception | None:
        if request.is_cancelled:
            return CancelledError()
        if (expiry := _expiry(request, now)) is not None:
            return expiry
        if (reason := self._admission.why_late(request, now)) is not None and not request.is_launched:
            return DeadlineExceededError(reason)
        if self._closing.is_set() and request.started is None:
            return BackendError("this scorer was closed before the request's turn came")
        if self._health.state is EngineState.STALLED and request.started is None:
            return self._health.error()
        return None

    # Results

    def deliver(self, in_step: Collection[RequestState]) -> None:
        """End the requests that are computed, by this step or, if other requests computed their prefix, without one.
        Notify the other requests of this step of their progress."""
        now = monotonic()
        for request in self:
            request.retire_branches(self._cache)
            if request.is_computed and not request.is_cancelled:
                self.begin(request, now)
                self._counters.items_scored += request.num_items_done
                self.end(request, _expiry(request, now))
            elif request in in_step:
                request.notify()

    def end(self, request: RequestState, error: BaseException | None = None) -> None:
        """Remove the request and give its caller the result or the error."""
        self._remove(request)
        if error is None and request.task.pin_seconds is not None:
            error = self._pin(request, request.task.pin_seconds)
        if not request.is_finite:  # its prefix may be to blame
            self._cache.forget(request.entries)
        request.release_prefix(self._cache)
        self._admission.leave(request)
        request.finish(error)

    def _remove(self, request: RequestState) -> None:
        del self._requests[request]
        line = request.line
        del line.requests[request]
        if not line.requests:
            del self._lines[line]
            if request.size:
                del self._shared[request.task.priority, request.size]

    def _pin(self, request: RequestState, seconds: float) -> RequestError | None:
        tokens = (len(request.task.prefix_ids), request.cached_tokens)
        try:
            request.pinned = self._pins.add(request.entries, tokens, self._block_bytes, seconds)
        except RequestError as error:
            return error
        return None

    # Failures

    def invalidate_prefixes(self) -> None:
        """After a failure no cached block can be trusted: all requests compute their prefixes again."""
        for request in self._requests:
            self._admission.restore(request.invalidate_prefix(self._cache))
        self._pins.release_all()
        self._cache.clear()

    def fail(self, waiting: Iterable[RequestState]) -> None:
        """The engine has failed: end all requests, also those that were `waiting` to be received. The KV blocks that
        they hold are lost with the device."""
        for request in (*self._requests, *waiting):
            self._admission.leave(request)
            request.finish(self._health.error())
        self._requests.clear()
        self._lines.clear()
        self._shared.clear()


def _expiry(request: RequestState, now: float) -> DeadlineExceededError | None:
    """The error of a request that was not done by its deadline."""
    if not request.has_expired(now):
        return None
    waited = now - request.submitted
    return DeadlineExceededError(f"the request was not done after {waited:.3g} s; its deadline has passed")
