"""The scheduler: one thread that fills steps from all live requests, launches them, and delivers their outputs.

    receive    new requests, cancellations, deadlines, and the news that a step is done
    deliver    the outputs of a step to its requests, and the results of finished requests to their callers
    fill       the next step (`step_filler.py`), while the device runs the one before
    launch     its forwards, one after the other, on the device thread (`in_flight.py`)

Other threads reach it through one queue, and hear from it through `on_change` of their requests; nothing else crosses
threads. A request with a part in an in-flight step stays until that step is done, also if it is cancelled or expires.
After a step that fails, its requests are run again (`recovery.py`). Where the device does not work any more, the
scheduler ends, and all requests get an error (`health.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any, TypeVar

from prefixwise.contract.errors import BackendError
from prefixwise.engine.admission import DEFAULT_MAX_QUEUED_TOKENS, Admission
from prefixwise.engine.calibration import probe_costs
from prefixwise.engine.health import EngineFailedError, EngineHealth, Watchdog
from prefixwise.engine.in_flight import DeviceCall, InFlightStep, InFlightSteps
from prefixwise.engine.live_requests import LiveRequests
from prefixwise.engine.loras import Loras
from prefixwise.engine.prefix_cache import Pins, PrefixCache
from prefixwise.engine.recovery import Recovery, error_of_request
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.stats import Counters, EngineStats
from prefixwise.engine.step import Step
from prefixwise.engine.step_filler import fill_step
from prefixwise.engine.step_limits import StepBudget, StepLimits
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.forward.buckets import Buckets
from prefixwise.plan.cost_model import MeasuredCosts, Sample, static_costs

log = logging.getLogger("prefixwise")

Result = TypeVar("Result")

# A step shorter than this costs the host more than the device, as with tiny models and short requests. The scheduler
# then fills no step ahead, and waits this long for more requests, so that more of them share a step.
SHORT_STEP_SECONDS = 0.001

MAX_FAULTS = 3  # iterations in a row that fail, before the scheduler gives up


@dataclass(frozen=True)
class SchedulerOptions:
    """The scheduler's settings, the same for all requests. `launch/options.py` checks them."""

    prefix_cache: bool = True  # cache prefixes between requests
    chunked_prefill_size: int | None = None  # most tokens of one request's prefix in one step; None: its share
    max_queued_tokens: int | None = None  # waiting and running; None: chosen for the device
    watchdog_timeout: float = 0.0  # seconds of a step after which the device has failed; 0: no watchdog


class Scheduler:
    """Takes requests from any thread. `close` frees the device's memory."""

    def __init__(self, backend: Backend, options: SchedulerOptions | None = None) -> None:
        options = options or SchedulerOptions()
        info = backend.info
        self.backend = backend
        self.options = options
        max_tokens = options.max_queued_tokens or DEFAULT_MAX_QUEUED_TOKENS[info.device_kind]
        self.admission = Admission(max_tokens, info.step_tokens)
        self.cache = PrefixCache(info.num_kv_blocks, reuse=options.prefix_cache)
        longest = min(-(-backend.config.max_context_len // KV_BLOCK_SIZE), info.num_kv_blocks)
        self.pins = Pins(self.cache, longest)
        self.health = EngineHealth()
        self.costs = MeasuredCosts(static_costs(backend.config, info.device_kind))
        self._budget = StepBudget(StepLimits.of(info, options.chunked_prefill_size), self.costs, info)
        self._follow_costs()
        self._buckets = Buckets.of(info)
        self._counters = Counters()
        self._inbox: SimpleQueue[tuple[RequestState, ...] | DeviceCall[Any] | None] = SimpleQueue()  # None: wake up
        self._num_submitted = self._num_received = 0  # requests put into the inbox, and taken out
        self._calls: list[DeviceCall[Any]] = []  # they wait until nothing is in flight
        self._next_step: Step | None = None  # filled ahead, launched when the step before it is done
        self._polls_in_flight = 0  # iterations since the launch, where one step is in flight at a time
        self._poll_timeout: float | None = 0.0  # how long the next iteration may wait for messages; None: no bound
        self._was_short = False  # the last step was shorter than SHORT_STEP_SECONDS
        self._closing = threading.Event()
        self._live = LiveRequests(
            self.cache, self.pins, self.admission, self.health, self._counters, self._closing, info.kv_block_bytes
        )
        self._submit_lock = threading.Lock()  # what is submitted before `close` is answered
        wake = partial(self._inbox.put, None)
        self._in_flight = InFlightSteps(backend, wake, self.health, self.costs)
        self._recovery = Recovery(backend, self._in_flight, self._budget, self._counters)
        self._watchdog = Watchdog(self.health, self._in_flight, options.watchdog_timeout, wake)
        self.loras = Loras(backend, self.call)
        self._thread = threading.Thread(target=self._run, name="prefixwise-scheduler", daemon=True)
        self._thread.start()
        self._watchdog.start()
        backend.when_lost(self._on_lost)

    # For any thread

    def _on_lost(self, reason: str) -> None:
        self.health.fail(reason)
        self._inbox.put(None)

    def submit(self, *requests: RequestState) -> None:
        """One or more, all of them or none, so that they share steps.

        Raises QueueFullError, RequestTooLargeError where they cannot meet their deadline, BackendError after `close`,
        UnavailableError while the engine cannot score, ModelNotFoundError where a LoRA adapter is gone.
        """
        assert requests
        self.health.check()
        for request in requests:
            if request.task.lora_id:
                request.lora = self.loras.held(request.task.lora_id)
            request.expect_hits(self.cache)
        with self._submit_lock:
            self._check_open()
            self.admission.admit(requests)
            self._num_submitted += len(requests)
            self._inbox.put(requests)

    def call(self, function: Callable[[], Result]) -> Result:
        """Run the function on the device thread, between steps, and wait for it."""
        if self._in_flight.is_device_thread:
            return function()
        self.health.check()
        assert threading.current_thread() is not self._thread, "the scheduler would wait for itself"
        call: DeviceCall[Result] = DeviceCall(function)
        with self._submit_lock:
            self._check_open()
            self._inbox.put(call)
        return call.answer.result()

    def calibrate(self) -> None:
        """Measure on this machine what forwards cost, for about a second; nothing where steps have no bound in time.
        Requests wait meanwhile."""

        def run() -> None:
            room = self.cache.acquire([None], self)  # evicts a block for that of the probe
            try:
                self.costs.calibrate(probe_costs(self.backend, self.costs.model, has_room=room is not None))
            finally:
                self.cache.release(room or (), self)
            self._follow_costs()

        if self.backend.info.step_seconds is not None:
            self.call(run)

    def release_pin(self, prefix_id: str) -> bool:
        """Unpin a prefix; its blocks may be evicted before the next step. False if no pinned prefix has this id."""
        is_known = self.pins.unpin(prefix_id)
        self._inbox.put(None)
        return is_known

    def close(self) -> None:
        """Finish what was started, refuse the rest, free the device's memory. A second call waits for the first."""
        if self.health.is_in_fork:
            return
        with self._submit_lock:
            self._closing.set()
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stats(self) -> EngineStats:
        """A snapshot. It takes no lock, so its values may be of slightly different moments."""
        requests = list(self._live)
        running = [request for request in requests if request.started is not None]
        running_tokens = sum(request.tokens_left for request in running)
        return EngineStats(
            running_requests=len(running),
            waiting_requests=len(requests) - len(running) + self._num_submitted - self._num_received,
            running_tokens=running_tokens,
            waiting_tokens=max(0, self.admission.tokens - running_tokens),
            tokens_per_second=self.admission.tokens_per_second or 0.0,
            max_step_tokens=self._budget.limits.most_weight,
            cost_source=self.costs.source,
            **vars(self.costs.model),
            refused_requests=dict(self.admission.refusals),
            **vars(self._counters),
            cached_blocks=self.cache.num_blocks,
            used_blocks=self.cache.num_used,
            pinned_blocks=self.pins.num_blocks,
            cache_capacity_blocks=self.cache.capacity,
            block_bytes=self.backend.info.kv_block_bytes,
        )

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise BackendError("this scorer is closed, so its model is gone; make another one")
        self.health.check()

    # The scheduler's thread

    def _run(self) -> None:
        try:
            self._iterate_until_closed()
            self._receive(0.0)
            self._live.drop_expired()  # also what was submitted too late
            self._run_calls()
            self.pins.release_all()
            self.cache.clear()
            self._in_flight.close()
        except BaseException as error:
            self._fail(error)
        finally:
            self._watchdog.stop()

    def _iterate_until_closed(self) -> None:
        num_faults = 0
        while not (self._closing.is_set() and not self._live):
            try:
                self._iterate()
                num_faults = 0
            except Exception as error:
                num_faults += 1
                if isinstance(error, EngineFailedError) or num_faults == MAX_FAULTS:
                    raise
                log.exception("the scheduler failed")  # a bug: end the live requests with it, and go on
                self._discard_in_flight()
                for request in self._live:
                    self._live.end(request, error)
                self._poll_timeout = 0.0

    def _fail(self, error: BaseException) -> None:
        """The end of the engine: all requests get an error, those that wait now and those that come."""
        is_device = isinstance(error, EngineFailedError)
        with self._submit_lock:  # what was submitted before is in the inbox now
            self.health.fail(str(error) if is_device else "the scheduler has died")
        log.critical("the engine has failed: %s", self.health.reason, exc_info=None if is_device else error)
        waiting: list[RequestState] = []
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, tuple):
                waiting.extend(message)
            elif message is not None:
                self._calls.append(message)
        self._live.fail(waiting)
        for call in self._calls:
            call.answer.set_exception(self.health.error())
        self._in_flight.abandon()

    def _iterate(self) -> None:
        """Receive messages, deliver finished steps, launch the next one."""
        self._receive(self._poll_timeout)
        if self.health.failed.is_set():
            raise EngineFailedError(self.health.reason)
        while (done := self._in_flight.pop_done()) is not None:
            self._finish(done)
        self._run_calls()
        if self._was_short and self._live and not self._in_flight:  # more requests in one step cost the host less
            sleep(SHORT_STEP_SECONDS)
            self._receive(0.0)
        if self._live.drop_expired():
            self._next_step = None
        self._poll_timeout = self._launch_next()

    # Receive

    def _receive(self, poll_timeout: float | None) -> None:
        """Take all messages from the inbox. If it is empty, wait up to `poll_timeout` seconds; None: no bound."""
        limits = (poll_timeout, self.pins.release_expired())
        timeout = min((seconds for seconds in limits if seconds is not None), default=None)
        is_first = True
        while True:
            try:
                message = self._inbox.get(block=is_first and timeout != 0.0, timeout=timeout)
            except Empty:
                break
            is_first = False
            if isinstance(message, tuple):
                self._add(message)
            elif message is not None:
                self._calls.append(message)

    def _add(self, requests: Sequence[RequestState]) -> None:
        for request in requests:
            self._live.add(request)
        pairs_per_token = self._budget.limits.pairs_per_token
        self._budget.count_arrival(min(each.weight(pairs_per_token) for each in requests), monotonic())
        self._num_received += len(requests)
        self._next_step = None

    def _run_calls(self) -> None:
        """Run the waiting calls if nothing is in flight. Until then no step is launched."""
        while self._calls and not self._in_flight:
            self._next_step = None
            self._calls.pop(0).run(self._in_flight)

    # Fill and launch

    def _launch_next(self) -> float | None:
        """Launch the next step if there is one and it is time. Returns the next poll timeout."""
        if not self._live or self._calls:
            return 0.0 if self._closing.is_set() and not self._live else None
        seconds = self._in_flight.seconds_until_launch(now := monotonic())
        if seconds != 0.0:
            return self._fill_ahead() if seconds is None else seconds
        step, self._next_step = self._next_step or self._fill(), None
        if step is not None and not (step.is_timed and self._in_flight):
            self._launch(step, now)
            return None if all(request.is_launched for request in self._live) else 0.0
        if self._in_flight:
            return None
        self._live.deliver(())
        self._evict_pin_if_stuck()
        return 0.0

    def _fill_ahead(self) -> float | None:
        """With one step in flight at a time, fill the next one meanwhile, unless the running one is short."""
        if self._in_flight.max_steps > 1:
            return None
        self._polls_in_flight += 1
        if self._polls_in_flight == 1:
            return SHORT_STEP_SECONDS
        if self._polls_in_flight == 2:
            self._next_step = self._fill()
        return None

    def _fill(self) -> Step | None:
        unlaunched = self._live.unlaunched()
        return fill_step(self._budget.limits_at(monotonic()), self.cache, unlaunched) if unlaunched else None

    def _evict_pin_if_stuck(self) -> None:
        """If all live requests wait for KV blocks that are pinned, evict a pinned prefix before it expires."""
        if self._live and self._fill() is None:
            if not self.pins.evict_oldest():
                raise RuntimeError("requests are waiting, and none of them can be served")
            log.warning("a pinned prefix was evicted before it expired, as a request needed its KV blocks")

    def _launch(self, step: Step, now: float) -> None:
        for forward in step.forwards:
            forward.bucket = self._buckets.fit(forward.num_tokens)
            forward.advance_requests()
        for request in step.requests:
            self._live.begin(request, now)
            request.num_in_flight += 1
        for line in dict.fromkeys([request.line for request in step.requests]):
            line.turn_tokens = step.cut.get(line, 0)
            if not line.turn_tokens:
                self._live.end_turn(line)
        self._polls_in_flight = 0
        self._in_flight.launch(step, now)

    # Deliver

    def _finish(self, done: InFlightStep) -> None:
        """Deliver the outputs of a step that is done, or recover from its failure."""
        step = done.step
        step.land()
        try:
            is_finite = step.deliver(done.outputs.result(), self.backend.config.model_size)
        except BaseException as error:  # also those of the device thread that are no Exception
            self._recover(step, error)
            return
        end = monotonic()
        begin = self._in_flight.record_end(done, end)
        for request in step.requests:
            if request.started == done.launched:
                request.started = begin  # it waited for the step before
        self._was_short = end - begin < SHORT_STEP_SECONDS
        self._count(step, end - begin)
        self._learn_costs(done, begin, end)
        self._live.deliver(set(step.requests))
        self._recovery.count_step(is_finite=is_finite)

    def _count(self, step: Step, seconds: float) -> None:
        counters = self._counters
        counters.steps += 1
        counters.forwards += len(step.forwards)
        counters.device_seconds += seconds
        counters.tokens_computed += step.num_tokens
        counters.tokens_padded += sum(forward.bucket for forward in step.forwards)
        step.count(seconds)
        self.admission.count_step(step.num_tokens)

    def _learn_costs(self, done: InFlightStep, begin: float, end: float) -> None:
        """Correct the cost model by a step. A device that was idle has waited for the host, which is no cost of it."""
        info = self.backend.info
        if (begin > done.launched) if info.async_scheduling else (info.step_seconds is not None):
            self.costs.record(Sample(done.step.work, end - begin))
            self._follow_costs()

    def _follow_costs(self) -> None:
        """Bound the steps by what the cost model says now, and by what was seen to fit in memory."""
        self._budget.follow_costs()
        limits = self._budget.limits
        self.admission.resize_steps(limits.most_weight, limits.share)

    # Recover

    def _recover(self, step: Step, error: BaseException) -> None:
        """After a failed step: end the requests that are to blame. The other ones are run again."""
        if not all(request.is_cancelled for request in step.requests):
            log.error("a forward pass failed", exc_info=error)
        self._discard_in_flight(step)
        for request in self._recovery.blamed_requests(step, error):
            self._live.end(request, error_of_request(error))

    def _discard_in_flight(self, failed: Step | None = None) -> None:
        """After a failure no cached block can be trusted. All requests compute their prefixes again, and the units of
        the failed step and of those in flight, which may have read such blocks."""
        self._next_step = None
        for each in self._in_flight.drain():
            each.step.land()
            each.step.roll_back()
        if failed is not None:
            failed.roll_back()
        self._live.invalidate_prefixes()
