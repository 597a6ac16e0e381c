"""Steps on their way through the device: started in order, answered in order.

Where the device works by itself once a step is started (`BackendInfo.async_scheduling`), the next is given to it a little
before it is done, so that it need not wait for the host; a second thread waits for the answers meanwhile. Not earlier:
whoever comes in between has a part in the step that is not yet started. Elsewhere there is one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic

from prefixwise.engine.device_thread import DeviceThread
from prefixwise.engine.step_forwards import Step, StepForward
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import ForwardOutput, RunningForward

# So long before the device is done the next step is begun. To fill and to start one takes the host 5 to 10 ms while
# other threads are at work: with 8 requests of 12,000 tokens in flight an H200 was idle 3 % of the time with 6 ms, and
# never with 15.
START_AHEAD_SECONDS = 0.015
SLOWER_WEIGHT = 0.1  # how much a step counts that was slower than expected; one that was faster counts whole


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """One that the device has been given."""

    step: Step
    launched: float  # of time.monotonic()
    outputs: Future[list[ForwardOutput]]


class StepsInFlight:
    """For the scheduler's thread. `wake` is called by another one whenever a step is done."""

    def __init__(self, backend: Backend, wake: Callable[[], None]) -> None:
        self.most = 2 if backend.info.async_scheduling else 1
        self._backend = backend
        self._wake = wake
        self._device = DeviceThread()
        self._waiter = DeviceThread("prefixwise-answers") if self.most > 1 else self._device
        self._steps: deque[StepInFlight] = deque()
        self._last_end = 0.0  # when the last answer came
        self._seconds_per_token: float | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_device_thread(self) -> bool:
        """Is it the device's own thread that asks?"""
        return self._device.is_current

    def call(self, function: Callable[[], object]) -> object:
        """Run it on the device's thread, behind all that was started, and wait for it."""
        return self._device.submit(function).result()

    def launch(self, step: Step, now: float) -> None:
        running = self._device.submit(self._start, step)
        outputs = self._waiter.submit(_wait, running)
        self._steps.append(StepInFlight(step, now, outputs))
        outputs.add_done_callback(lambda _: self._wake())

    def seconds_until_room(self, now: float) -> float | None:
        """When the next step should be launched: 0.0 at once, None: not before one is done."""
        if not self._steps:
            return 0.0
        if len(self._steps) == self.most:
            return None
        if self._seconds_per_token is None:
            return 0.0
        newest = self._steps[-1]
        expected = self._begin(newest) + self._seconds_per_token * newest.step.num_tokens
        return max(0.0, expected - START_AHEAD_SECONDS - now)

    def take_done(self) -> StepInFlight | None:
        """The oldest, if it is done."""
        return self._steps.popleft() if self._steps and self._steps[0].outputs.done() else None

    def begin_of(self, done: StepInFlight, end: float) -> float:
        """Since when the device was at this step alone. To be asked once for each, in order."""
        begin, self._last_end = self._begin(done), end
        if done.step.num_tokens:
            self._learn((end - begin) / done.step.num_tokens)
        return begin

    def drain(self) -> list[StepInFlight]:
        """Wait for all; the newest first. Nobody gets what they answered."""
        taken = list(reversed(self._steps))
        self._steps.clear()
        for each in reversed(taken):
            each.outputs.exception()
        return taken

    def close(self) -> None:
        """Give the device's memory back."""
        self._device.submit(self._backend.close).result()
        self._device.stop()
        if self._waiter is not self._device:
            self._waiter.stop()

    def _begin(self, each: StepInFlight) -> float:
        return max(each.launched, self._last_end)

    def _learn(self, seconds_per_token: float) -> None:
        known = self._seconds_per_token
        if known is None or seconds_per_token < known:
            self._seconds_per_token = seconds_per_token
        else:
            self._seconds_per_token = known + SLOWER_WEIGHT * (seconds_per_token - known)

    # On the device's thread

    def _start(self, step: Step) -> list[RunningForward]:
        running = [self._start_forward(forward) for forward in step.forwards]
        if all(forward.is_prefill for forward in step.forwards):
            self._backend.synchronize()  # else nobody would wait for what is only kept
        return running

    def _start_forward(self, forward: StepForward) -> RunningForward:
        begin = monotonic()
        running = self._backend.start(forward.ready_batch())
        forward.keep(running.blocks)
        if forward.is_prefill and any(job.timed for job in forward.jobs):
            self._backend.synchronize()
        forward.start_seconds = monotonic() - begin
        return running


def _wait(running: Future[list[RunningForward]]) -> list[ForwardOutput]:
    """On the thread that waits."""
    return [each.wait() for each in running.result()]
