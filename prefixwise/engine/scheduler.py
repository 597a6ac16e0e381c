"""The scheduler: steps filled from all live jobs, for one thread that owns the device.

    receive    new jobs, cancellations, deadlines, and the news that a step is done
    finish     what is done: its logits to the jobs, and their answers to those that wait
    fill       the next step (`steps.py`), while the device runs the one before
    launch     its forwards, one after the other, on the device's own thread (`steps_in_flight.py`)

Others talk to it through one queue and the jobs' own `on_change`; nothing else crosses threads. A job that has a part
in a step that is in flight stays until that is done, whatever happens to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TypeVar

from prefixwise.contract.errors import (
    BackendError,
    CancelledError,
    DeadlineExceededError,
    InvalidValueError,
    RequestError,
)
from prefixwise.engine.admission import DEFAULT_MAX_QUEUED_TOKENS, Admission
from prefixwise.engine.job import Job
from prefixwise.engine.pins import Pins
from prefixwise.engine.prefix_cache import PrefixCache
from prefixwise.engine.stats import Counters, EngineStats
from prefixwise.engine.step_forwards import Step
from prefixwise.engine.steps import StepFiller, StepLimits
from prefixwise.engine.steps_in_flight import StepInFlight, StepsInFlight
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.forward.buckets import Buckets

log = logging.getLogger("prefixwise")

Result = TypeVar("Result")

# A step this short costs the host more than the device, as with tiny models and short requests. Then nothing is
# prepared beside it, and requests are gathered for as long, so that more of them share a step.
SHORT_STEP_SECONDS = 0.001


@dataclass(frozen=True)
class SchedulerOptions:
    """What holds for all requests."""

    prefix_cache: bool = True  # keep prefixes from one request to the next
    chunked_prefill_size: int | None = None  # most tokens of one request's prefix in one step; None: its share
    max_queued_tokens: int | None = None  # waiting and running; None: chosen for the device

    def __post_init__(self) -> None:
        for name in ("chunked_prefill_size", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                message = f"{name} must be a whole number of at least 1 token, got {value!r}"
                raise InvalidValueError(message, code=f"invalid_{name}", param=name)


@dataclass(frozen=True)
class _Call:
    """Something to be run between steps."""

    function: Callable[[], object]
    answer: Future[object]


class Scheduler:
    """Takes jobs from any thread. Close it to give the device's memory back."""

    def __init__(self, backend: Backend, options: SchedulerOptions | None = None) -> None:
        options = options or SchedulerOptions()
        info = backend.info
        self.backend = backend
        self.options = options
        self.admission = Admission(options.max_queued_tokens or DEFAULT_MAX_QUEUED_TOKENS[info.device_kind])
        self.cache = PrefixCache(info.num_kv_blocks, keeps=options.prefix_cache)
        longest = min(-(-backend.config.max_context_len // KV_BLOCK_SIZE), info.num_kv_blocks)
        self.pins = Pins(self.cache, longest)
        self._limits = StepLimits(
            info.step_tokens, options.chunked_prefill_size, info.max_kv_blocks_read, info.joins_prefill
        )
        self._buckets = Buckets.of(info)
        self._counters = Counters()
        self._inbox: SimpleQueue[Job | _Call | None] = SimpleQueue()
        self._num_submitted = self._num_received = 0  # jobs put into the inbox, and taken out
        self._live: dict[Job, None] = {}  # in the order of their turn: whoever was served goes to the end
        self._calls: list[_Call] = []  # that wait until nothing is in flight
        self._prepared: Step | None = None  # filled, and to be launched when the one before it is done
        self._turns_beside = 0  # since a step was launched that none may be launched beside
        self._patience: float | None = 0.0  # how long the next turn may wait for news; None: until there are any
        self._was_short = False  # was the last step over at once?
        self._closing = threading.Event()
        self._door = threading.Lock()  # whoever is through it before `close` is answered
        self._in_flight = StepsInFlight(backend, wake=lambda: self._inbox.put(None))
        self._thread = threading.Thread(target=self._run, name="prefixwise-scheduler", daemon=True)
        self._thread.start()

    # For any thread

    def release_pin(self, prefix_id: str) -> bool:
        """False where there is none of this id. Its blocks may go before the next step."""
        is_known = self.pins.end(prefix_id)
        self._inbox.put(None)
        return is_known

    def submit(self, job: Job) -> None:
        """Raises QueueFullError, and BackendError after `close`."""
        with self._door:
            self._check_open()
            self.admission.admit(job.num_tokens)
            self._num_submitted += 1
            self._inbox.put(job)

    def call(self, function: Callable[[], Result]) -> Result:
        """Run it on the device's thread, between steps, and wait for it."""
        if self._in_flight.is_device_thread:
            return function()
        assert threading.current_thread() is not self._thread, "the scheduler would wait for itself"
        answer: Future[object] = Future()
        with self._door:
            self._check_open()
            self._inbox.put(_Call(function, answer))
        return answer.result()  # type: ignore[return-value]  # what the function returned

    def close(self) -> None:
        """Let what has been started end, refuse the rest, give the device's memory back. A second call waits too."""
        with self._door:
            self._closing.set()
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stats(self) -> EngineStats:
        """As good as a moment's, since nothing is locked."""
        jobs = list(self._live)
        running = [job for job in jobs if job.started is not None]
        running_tokens = sum(job.tokens_left for job in running)
        return EngineStats(
            running_requests=len(running),
            waiting_requests=len(jobs) - len(running) + self._num_submitted - self._num_received,
            running_tokens=running_tokens,
            waiting_tokens=max(0, self.admission.tokens - running_tokens),
            **vars(self._counters),
            cached_blocks=self.cache.num_blocks,
            used_blocks=self.cache.num_used,
            pinned_blocks=self.pins.num_blocks,
            cache_capacity_blocks=self.cache.capacity,
            block_bytes=self.backend.info.kv_block_bytes,
        )

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise BackendError("this scorer is closed, so its model is gone; make another one")

    # The scheduler's own thread

    def _run(self) -> None:
        while not (self._closing.is_set() and not self._live):
            try:
                self._turn()
            except Exception as error:  # a fault of ours: the requests that it may have hurt are told
                log.exception("the scheduler failed")
                self._recover(list(self._live), error)
                self._patience = 0.0
        self._receive(0.0)
        self._drop_the_hopeless()  # what came too late is refused
        self._answer_calls()
        self.pins.release_all()
        self.cache.forget()
        self._in_flight.close()

    def _turn(self) -> None:
        """Wait for news where there is nothing else to do; then what they ask for, and the next step."""
        self._receive(self._patience)
        while (done := self._in_flight.take_done()) is not None:
            self._finish(done)
        self._answer_calls()
        if self._was_short and self._live and not self._in_flight:  # then more of them in one step cost the host less
            sleep(SHORT_STEP_SECONDS)
            self._receive(0.0)
        self._drop_the_hopeless()
        self._patience = self._go_on()

    def _go_on(self) -> float | None:
        """Launch the next step, if there is anything to do and it is time; how long there is to wait for news then."""
        if not self._live or self._calls:
            return 0.0 if self._closing.is_set() and not self._live else None
        seconds = self._in_flight.seconds_until_room(now := monotonic())
        if seconds != 0.0:
            return self._prepare_beside() if seconds is None else seconds
        step, self._prepared = self._prepared or self._fill(), None
        if step is not None and not (step.is_timed and self._in_flight):
            self._launch(step, now)
            return 0.0
        if self._in_flight:
            return None
        self._deliver(())
        self._make_way()
        return 0.0

    def _prepare_beside(self) -> float | None:
        """Where there is one step at a time, fill the next while the device runs it, unless it is over at once."""
        if self._in_flight.most > 1:
            return None
        self._turns_beside += 1
        if self._turns_beside == 1:
            return SHORT_STEP_SECONDS
        if self._turns_beside == 2:
            self._prepared = self._fill()
        return None

    def _make_way(self) -> None:
        """Where all that is left waits for room that only pinned prefixes have, one of these goes before its time."""
        if self._live and self._fill() is None:
            if not self.pins.give_up_one():
                raise RuntimeError("requests are waiting, and none of them can be served")
            log.warning("a pinned prefix was released before its time, as a request needed its room")

    def _receive(self, patience: float | None) -> None:
        """Take in what has come. Where nothing has, wait for it so long; None: until something comes."""
        limits = (patience, self.pins.expire())
        timeout = min((seconds for seconds in limits if seconds is not None), default=None)
        is_first = True
        while True:
            try:
                message = self._inbox.get(block=is_first and timeout != 0.0, timeout=timeout)
            except Empty:
                break
            is_first = False
            if isinstance(message, Job):
                self._take_in(message)
            elif message is not None:
                self._calls.append(message)

    def _take_in(self, job: Job) -> None:
        self._live[job] = None
        self._num_received += 1
        self._prepared = None
        if job.pin_seconds is not None:
            try:
                self.pins.check_room(len(job.keys))
            except RequestError as error:
                self._end(job, error)

    def _answer_calls(self) -> None:
        """Those that wait, where nothing is in flight; until then no step is launched."""
        while self._calls and not self._in_flight:
            call = self._calls.pop(0)
            self._prepared = None
            if not call.answer.set_running_or_notify_cancel():
                continue
            try:
                call.answer.set_result(self._in_flight.call(call.function))
            except BaseException as error:  # it is the caller's
                call.answer.set_exception(error)

    def _drop_the_hopeless(self) -> None:
        """Jobs that nobody waits for any more; those that are in flight, when they have come back."""
        now = monotonic()
        for job in list(self._live):
            error = self._reason_to_end(job, now)
            if error is not None:
                self._prepared = None  # it may have a part in it
                if not job.num_in_flight:
                    self._end(job, error)

    def _reason_to_end(self, job: Job, now: float) -> Exception | None:
        if job.is_cancelled:
            return CancelledError()
        if job.deadline is not None and now >= job.deadline:
            return DeadlineExceededError(f"the request was not done after {now - job.submitted:.3g} s; its time is up")
        if self._closing.is_set() and job.started is None:
            return BackendError("this scorer was closed before the request's turn came")
        return None

    def _fill(self) -> Step | None:
        now = monotonic()
        jobs = [job for job in self._live if not job.num_in_flight or self._reason_to_end(job, now) is None]
        return StepFiller(self._limits, self.cache).fill(jobs) if jobs else None

    def _launch(self, step: Step, now: float) -> None:
        """From here on the jobs' next parts are those behind this step's."""
        for forward in step.forwards:
            forward.bucket = self._buckets.fit(forward.num_tokens)
            forward.advance_jobs()
        for job in step.jobs:
            self._begin(job, now)
            job.num_in_flight += 1
            del self._live[job]
            self._live[job] = None  # at the end
        self._turns_beside = 0
        self._in_flight.launch(step, now)

    def _finish(self, done: StepInFlight) -> None:
        step = done.step
        for job in step.jobs:
            job.num_in_flight -= 1
        try:
            for forward, output in zip(step.forwards, done.outputs.result(), strict=True):
                forward.hand_out(output)
        except Exception as error:
            if not all(job.is_cancelled for job in step.jobs):
                log.exception("a forward pass failed")
            self._recover(step.jobs, error)
            return
        end = monotonic()
        begin = self._in_flight.begin_of(done, end)
        for job in step.jobs:
            if job.started == done.launched:
                job.started = begin  # it waited for the step before
        self._was_short = end - begin < SHORT_STEP_SECONDS
        self._count(step, end - begin)
        self._deliver(set(step.jobs))

    def _begin(self, job: Job, now: float) -> None:
        if job.started is None:
            job.started = now
            self._counters.prefix_queried_tokens += len(job.prefix_ids)
            self._counters.prefix_hit_tokens += job.cached_tokens

    def _count(self, step: Step, seconds: float) -> None:
        counters = self._counters
        counters.steps += 1
        counters.forwards += len(step.forwards)
        counters.device_seconds += seconds
        counters.tokens_computed += step.num_tokens
        counters.tokens_padded += sum(forward.bucket for forward in step.forwards)
        step.count(seconds)
        self.admission.done(step.num_tokens)

    def _deliver(self, stepped: Collection[Job]) -> None:
        """End what is complete, in this step or without any (a prefix that others have computed); tell the others of
        this step that they went on."""
        for job in list(self._live):
            if job.is_answered and not job.is_cancelled:
                self._begin(job, monotonic())
                self._counters.items_scored += job.num_items_done
                self._end(job)
            elif job in stepped:
                job.changed()

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """The job leaves, with its answer or an error."""
        del self._live[job]
        if error is None and job.pin_seconds is not None:
            error = self._pin(job, job.pin_seconds)
        job.drop_prefix(self.cache)
        self.admission.done(job.tokens_left, computed=False)
        job.finish(error)

    def _pin(self, job: Job, seconds: float) -> RequestError | None:
        tokens = (len(job.prefix_ids), job.cached_tokens)
        try:
            job.pinned = self.pins.add(job.entries or (), tokens, self.backend.info.kv_block_bytes, seconds)
        except RequestError as error:
            return error
        return None

    def _recover(self, failed: Iterable[Job], error: Exception) -> None:
        """After a failure no kept prefix can be trusted: the others compute theirs again, and so much of the rest as
        was in flight, since it may have read them."""
        self._prepared = None
        for each in self._in_flight.drain():
            each.step.take_back()
        for job in failed:
            if job in self._live:
                self._end(job, error)
        for job in self._live:
            self.admission.done(-job.lose_prefix(self.cache), computed=False)  # they are to be computed again
        self.pins.release_all()
        self.cache.forget()
