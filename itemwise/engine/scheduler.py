"""The scheduler: steps filled from all live jobs, for one thread that owns the device.

    receive    new jobs, cancellations, deadlines
    fill       the next step (`steps.py`), prepared while the device runs the one before
    execute    its forwards, one after the other, on the device's own thread
    deliver    their logits

Others talk to it through one queue and the jobs' own `on_change`; nothing else crosses threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TypeVar

from itemwise.backends.base import PREFIX_BLOCK, Backend, ForwardOutput, RunningForward
from itemwise.contract.errors import (
    BackendError,
    CancelledError,
    DeadlineExceededError,
    InvalidValueError,
    RequestError,
)
from itemwise.engine.admission import DEFAULT_MAX_QUEUED_TOKENS, Admission
from itemwise.engine.device_thread import DeviceThread
from itemwise.engine.job import Job
from itemwise.engine.pins import Pins
from itemwise.engine.prefix_cache import PrefixCache
from itemwise.engine.stats import Counters, EngineStats
from itemwise.engine.step_forwards import Step, StepForward
from itemwise.engine.steps import StepFiller, StepLimits
from itemwise.plan.buckets import Buckets

log = logging.getLogger("itemwise")

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
        self.cache = PrefixCache(info.num_prefix_blocks, keeps=options.prefix_cache)
        longest = min(-(-backend.config.max_context_len // PREFIX_BLOCK), info.num_prefix_blocks)
        self.pins = Pins(self.cache, longest)
        self._limits = StepLimits(
            info.step_tokens, options.chunked_prefill_size, info.max_blocks_read, info.joins_prefill
        )
        self._buckets = Buckets.of(info)
        self._counters = Counters()
        self._inbox: SimpleQueue[Job | _Call | None] = SimpleQueue()
        self._num_submitted = self._num_received = 0  # jobs put into the inbox, and taken out
        self._live: dict[Job, None] = {}  # in the order of their turn: whoever was served goes to the end
        self._prepared: Step | None = None
        self._was_short = False  # was the last step over at once?
        self._closing = threading.Event()
        self._door = threading.Lock()  # whoever is through it before `close` is answered
        self._device = DeviceThread()
        self._thread = threading.Thread(target=self._run, name="itemwise-scheduler", daemon=True)
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
        if self._device.is_current:
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
            block_bytes=self.backend.info.prefix_block_bytes,
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
        self._receive()  # what came too late is refused
        self.pins.release_all()
        self.cache.forget()
        self._device.submit(self.backend.close).result()
        self._device.stop()

    def _turn(self) -> None:
        """One step, if there is anything to do."""
        self._receive()
        if self._was_short and self._live:  # then more of them in one step cost the host less
            sleep(SHORT_STEP_SECONDS)
            self._receive()
        step = self._prepared or self._fill()
        self._prepared = None
        if step is not None:
            self._run_step(step)
        elif self._live:
            self._deliver(())
            self._make_way()

    def _make_way(self) -> None:
        """Where all that is left waits for room that only pinned prefixes have, one of these goes before its time."""
        if self._live and self._fill() is None:
            if not self.pins.give_up_one():
                raise RuntimeError("requests are waiting, and none of them can be served")
            log.warning("a pinned prefix was released before its time, as a request needed its room")

    def _receive(self) -> None:
        """Take in what has come; where there is nothing to do, wait for it."""
        timeout = self.pins.expire()
        is_idle = not self._live and not self._closing.is_set()
        while True:
            try:
                message = self._inbox.get(block=is_idle, timeout=timeout if is_idle else None)
            except Empty:
                break
            is_idle = False
            if isinstance(message, Job):
                self._take_in(message)
            elif message is not None:
                self._answer(message)
        self._drop_the_hopeless()

    def _take_in(self, job: Job) -> None:
        self._live[job] = None
        self._num_received += 1
        self._prepared = None
        if job.pin_seconds is not None:
            try:
                self.pins.check_room(len(job.keys))
            except RequestError as error:
                self._end(job, error)

    def _answer(self, call: _Call) -> None:
        self._prepared = None
        if not call.answer.set_running_or_notify_cancel():
            return
        try:
            call.answer.set_result(self._device.submit(call.function).result())
        except BaseException as error:  # it is the caller's
            call.answer.set_exception(error)

    def _drop_the_hopeless(self) -> None:
        """Jobs that nobody waits for any more."""
        now = monotonic()
        for job in list(self._live):
            error = self._reason_to_end(job, now)
            if error is not None:
                self._prepared = None  # it may have a part in it
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
        return StepFiller(self._limits, self.cache).fill(self._live) if self._live else None

    def _run_step(self, step: Step) -> None:
        begin = monotonic()
        jobs = step.jobs
        self._hand_over(step, begin)
        execution = self._device.submit(self._execute, step)
        try:
            outputs = self._prepare_beside(execution)
            for forward, output in zip(step.forwards, outputs, strict=True):
                forward.hand_out(output)
        except Exception as error:
            if not all(job.is_cancelled for job in jobs):
                log.exception("a forward pass failed")
            self._recover(jobs, error)
            return
        seconds = monotonic() - begin
        self._was_short = seconds < SHORT_STEP_SECONDS
        self._count(step, seconds)
        self._deliver(jobs)

    def _prepare_beside(self, execution: Future[list[ForwardOutput]]) -> list[ForwardOutput]:
        """Fill the next step while the device runs this one, unless it is over at once."""
        with suppress(TimeoutError):  # whoever's: one of the forward itself is raised again below
            return execution.result(SHORT_STEP_SECONDS)
        try:
            self._prepared = self._fill()
        finally:
            outputs = execution.result()
        return outputs

    def _hand_over(self, step: Step, now: float) -> None:
        """From here on the jobs' next parts are those behind this step's."""
        for forward in step.forwards:
            forward.bucket = self._buckets.fit(forward.num_tokens)
            forward.advance_jobs()
            for job in forward.jobs:
                self._begin(job, now)
        for job in step.jobs:
            del self._live[job]
            self._live[job] = None  # at the end

    def _execute(self, step: Step) -> list[ForwardOutput]:
        """On the device's thread."""
        running = [self._start(forward) for forward in step.forwards]
        if all(forward.is_prefill for forward in step.forwards):
            self.backend.synchronize()  # else nobody would wait for what is only kept
        return [each.wait() for each in running]

    def _start(self, forward: StepForward) -> RunningForward:
        begin = monotonic()
        running = self.backend.start(forward.ready_batch())
        forward.keep(running.blocks)
        if forward.is_prefill and any(job.timed for job in forward.jobs):
            self.backend.synchronize()
        forward.start_seconds = monotonic() - begin
        return running

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
            if job.is_complete and not job.is_cancelled:
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
            job.pinned = self.pins.add(job.entries or (), tokens, self.backend.info.prefix_block_bytes, seconds)
        except RequestError as error:
            return error
        return None

    def _recover(self, failed: Iterable[Job], error: Exception) -> None:
        """After a failure no kept prefix can be trusted: the others compute theirs again."""
        self._prepared = None
        for job in failed:
            if job in self._live:
                self._end(job, error)
        for job in self._live:
            self.admission.done(-job.lose_prefix(self.cache), computed=False)  # they are to be computed again
        self.pins.release_all()
        self.cache.forget()
