"""In-flight steps: launched in order on the device thread, finished in order.

With async scheduling (`BackendInfo.async_scheduling`) the device runs by itself once a step is launched. The next step
is then launched shortly before the device is done, so that the device does not wait for the host, and a second thread
waits for the outputs. Not earlier: a request that arrives in between can still join the step that is not launched yet.
When the device will be done, the cost model says; how long before it the host must begin, the latest launches say.
Without async scheduling one step is in flight at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Generic, ParamSpec, TypeVar

import numpy as np

from prefixwise.contract.errors import BackendError
from prefixwise.engine.health import DeviceWork, EngineFailedError, EngineHealth, StepTimes
from prefixwise.engine.step import Step, StepForward
from prefixwise.forward.backend import PROBE, Backend, check_blocks, check_output
from prefixwise.forward.batch import ForwardOutput, RunningForward
from prefixwise.plan.cost_model import MeasuredCosts

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_LAUNCH_AHEAD_SECONDS = 0.015  # before the device is done, however slow the host is
LAUNCH_MARGIN = 1.5  # times the host's seconds for a launch
EARLY = 0.9  # of the seconds that a step is expected to take: a device that waits is worse than a step launched early
FASTER_WEIGHT = 0.02  # of a launch that took the host less time than the ones before; a slower one has weight 1
_POLL_SECONDS = 0.5  # while the scheduler waits for the device, which may have failed


class DeviceThread:
    """A thread that runs functions one after the other. It starts at once and ends after `stop`.

    It is no executor of the standard library: those refuse work as soon as the interpreter begins to exit, while
    threads of the program may still be scoring.
    """

    def __init__(self, name: str = "prefixwise-device") -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """The caller runs on this thread."""
        return threading.current_thread() is self._thread

    def submit(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Run the function after everything submitted before."""
        answer: Future[Result] = Future()
        self.post(partial(_fulfil, answer, partial(function, *args, **kwargs)))
        return answer

    def post(self, function: Callable[[], None]) -> None:
        """The same for a function that has no answer and does not raise."""
        self._work.put(function)

    def stop(self, *, wait: bool = True) -> None:
        """Run everything submitted before, then end the thread."""
        self._work.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # free its objects while the thread waits for more


def _fulfil(answer: Future[Result], function: Callable[[], Result]) -> None:
    """Run the function, and give the future what it returns or raises."""
    try:
        answer.set_result(function())
    except BaseException as error:  # raised in the caller by the future
        answer.set_exception(error)


@dataclass(frozen=True, eq=False)
class _Probe:
    """A forward of one token that shows whether the device works."""

    num_tokens: int = PROBE.num_tokens


@dataclass(frozen=True, eq=False)
class InFlightStep:
    """A step that was launched."""

    step: Step
    launched: float  # a value of time.monotonic()
    outputs: Future[list[ForwardOutput]]

    @property
    def num_tokens(self) -> int:
        """With padding."""
        return sum(forward.bucket for forward in self.step.forwards)


class InFlightSteps:
    """The launched steps, for the scheduler's thread. Another thread calls `wake` whenever a step is done."""

    def __init__(
        self,
        backend: Backend,
        wake: Callable[[], None],
        health: EngineHealth | None = None,
        costs: MeasuredCosts | None = None,
    ) -> None:
        self.max_steps = 2 if backend.info.async_scheduling else 1
        self.times = StepTimes()
        self._backend = backend
        self._wake = wake
        self._health = health or EngineHealth()
        self._device = DeviceThread()
        self._waiter = DeviceThread("prefixwise-answers") if self.max_steps > 1 else None
        self._steps: deque[InFlightStep] = deque()
        self._probe: DeviceWork | None = None  # while it runs
        self._last_end = 0.0  # when the last step was done
        self._costs = costs
        self._launch_seconds = 0.0  # from filling a step until the device has all of it; changed by the device thread

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_device_thread(self) -> bool:
        """The caller runs on the device thread."""
        return self._device.is_current

    def oldest(self) -> DeviceWork | None:
        """What the device is busy with. Any thread may ask."""
        try:
            return self._steps[0]
        except IndexError:
            return self._probe

    @property
    def is_compiling(self) -> bool:
        """The device waits for a program. Any thread may ask."""
        return self._backend.is_compiling

    def call(self, function: Callable[[], Result]) -> Result:
        """Run the function on the device thread, after everything launched before, and wait for it.

        Raises EngineFailedError if the device hangs.
        """
        return self._until_done(self._device.submit(function)).result()

    def probe(self) -> None:
        """Run a forward of one token. Raises what it raises, and BackendError where its output is wrong."""
        self._probe = _Probe()
        try:
            output = self.call(lambda: self._backend.forward(PROBE))
        finally:
            self._probe = None
        check_output(PROBE, output, self._backend.config.model_size)
        if not np.isfinite(output.label_logits).all():
            raise BackendError("a probe of one token got a logit that is not a finite number")

    def launch(self, step: Step, now: float) -> None:
        outputs: Future[list[ForwardOutput]] = Future()
        outputs.add_done_callback(lambda _: self._wake())
        self._steps.append(InFlightStep(step, now, outputs))
        self._device.post(partial(self._start, step, now, outputs))

    def seconds_until_launch(self, now: float) -> float | None:
        """When to launch the next step: 0.0: now; None: not before one is done."""
        if not self._steps:
            return 0.0
        if len(self._steps) == self.max_steps:
            return None
        if self._costs is None or self._costs.source == "static":
            return 0.0
        newest = self._steps[-1]
        expected = self._begin(newest) + EARLY * self._costs.model.seconds(newest.step.work)
        return max(0.0, expected - min(LAUNCH_MARGIN * self._launch_seconds, MAX_LAUNCH_AHEAD_SECONDS) - now)

    def pop_done(self) -> InFlightStep | None:
        """The oldest step, if it is done."""
        return self._steps.popleft() if self._steps and self._steps[0].outputs.done() else None

    def record_end(self, done: InFlightStep, end: float) -> float:
        """Return when the device began with this step. Call it once per step, in order."""
        begin, self._last_end = self._begin(done), end
        if done.step.num_tokens:
            self.times.record(done.num_tokens, end - begin)
        return begin

    def drain(self) -> list[InFlightStep]:
        """Wait for all steps and discard their outputs. Returns the steps, the newest first.

        Raises EngineFailedError if the device hangs.
        """
        discarded = list(reversed(self._steps))
        while self._steps:
            self._until_done(self._steps[0].outputs)
            self._steps.popleft()
        return discarded

    def _until_done(self, future: Future[Result]) -> Future[Result]:
        while not wait_for_futures([future], _POLL_SECONDS).done:
            if self._health.failed.is_set():
                raise EngineFailedError(self._health.reason)
        return future

    def close(self) -> None:
        """Free the device's memory and end the threads."""
        self._device.submit(self._backend.close).result()
        self._stop_threads(wait=True)

    def abandon(self) -> None:
        """The same for a device that may hang: whatever it still does, nothing waits for it."""
        self._device.submit(self._backend.close)
        self._stop_threads(wait=False)

    def _stop_threads(self, *, wait: bool) -> None:
        self._device.stop(wait=wait)
        if self._waiter is not None:
            self._waiter.stop(wait=wait)

    def _begin(self, each: InFlightStep) -> float:
        return max(each.launched, self._last_end)

    # On the device thread

    def _start(self, step: Step, launched: float, outputs: Future[list[ForwardOutput]]) -> None:
        """Start the step. The waiting thread, or this one, waits for its outputs."""
        try:
            running = [self._start_forward(forward) for forward in step.forwards]
            self._learn(monotonic() - launched)
        except BaseException as error:  # raised in the scheduler by the future
            outputs.set_exception(error)
            return
        wait = partial(_fulfil, outputs, lambda: [each.wait() for each in running])
        if self._waiter is None:
            wait()
        else:
            self._waiter.post(wait)

    def _learn(self, launch_seconds: float) -> None:
        seconds, known = min(launch_seconds, MAX_LAUNCH_AHEAD_SECONDS), self._launch_seconds
        self._launch_seconds = max(seconds, known + FASTER_WEIGHT * (seconds - known))

    def _start_forward(self, forward: StepForward) -> RunningForward:
        begin = monotonic()
        batch = forward.batch_with_prefixes()
        running = self._backend.start(batch)
        forward.cache_blocks(check_blocks(batch, running.blocks))
        if forward.is_prefill and any(request.task.is_timed for request in forward.requests):
            self._backend.synchronize()
        forward.start_seconds = monotonic() - begin
        return running


class DeviceCall(Generic[Result]):
    """A function to run on the device thread between steps, and its answer."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self.answer: Future[Result] = Future()
        self._function = function

    def run(self, steps: InFlightSteps) -> None:
        """Run the function and wait for it. What it raises is raised in the caller."""
        try:
            self.answer.set_result(steps.call(self._function))
        except BaseException as error:
            self.answer.set_exception(error)
