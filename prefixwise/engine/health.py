"""Whether the engine can score, and the watchdog that notices a device that hangs.

    ok           steps end
    stalled      a step takes far longer than steps of its size have taken; it may still end, and the state is ok again
    failed       the device does not compute any more, or the scheduler has died: only a restart helps
    restarting   the engine process has ended, and another one loads the model (with HTTP workers)

Unless the state is ok, new requests and those that wait are refused at once, so that clients ask another server.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from enum import StrEnum
from time import monotonic
from typing import Protocol

from prefixwise.contract.errors import BackendError, UnavailableError

log = logging.getLogger("prefixwise")

CHECK_SECONDS = 1.0  # between two looks of the watchdog
STALL_SECONDS = 10.0  # no step is stalled sooner
STALL_FACTOR = 20.0  # nor before it takes this many times as long as expected
STALL_RETRY_SECONDS, RESTART_SECONDS = 5, 30  # for clients; a restart loads the model again
FASTER_WEIGHT = 0.1  # of a step that was faster than expected; a slower one has weight 1


class EngineState(StrEnum):
    """The states of an engine, as `/health` and the metrics report them."""

    OK = "ok"
    STALLED = "stalled"
    FAILED = "failed"
    RESTARTING = "restarting"


class EngineFailedError(BackendError):
    """Ends the scheduler's thread: the device does not compute any more. The message is for clients, too."""


class EngineHealth:
    """The state of one engine and its reason. Any thread may use it. A failed engine stays failed."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._stalled: str | None = None  # the reason
        self._failure: str | None = None
        self._restart: str | None = None
        self._on_failed: list[Callable[[str], None]] = []

    @property
    def state(self) -> EngineState:
        if self._failure is not None:
            return EngineState.FAILED
        if self._restart is not None:
            return EngineState.RESTARTING
        return EngineState.OK if self._stalled is None else EngineState.STALLED

    @property
    def reason(self) -> str | None:
        """Why the engine is not ok."""
        return self._failure or self._restart or self._stalled

    @property
    def is_in_fork(self) -> bool:
        """This is a fork of the engine's process: without its threads, perhaps with locks that nobody will release."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raises UnavailableError (`engine_stalled`, `engine_failed`, `engine_restarting`) unless the engine is ok, and
        BackendError in a fork."""
        if self.is_in_fork:
            raise BackendError(
                f"a scorer works in the process that made it, {self._process}, got a call in {os.getpid()}, a fork of "
                'that; make one in each process, start processes with "spawn", or use Client with a server'
            )
        if self.reason is not None:
            raise self.error()

    def error(self) -> UnavailableError:
        """The error of a request that is refused in this state."""
        if self._failure is not None:
            message = f"nothing is scored now: {self._failure}; restart the server"
            return UnavailableError(message, code="engine_failed", retry_after=RESTART_SECONDS)
        if self._restart is not None:
            message = f"nothing is scored now: {self._restart}; the model is being loaded again, try again later"
            return UnavailableError(message, code="engine_restarting", retry_after=RESTART_SECONDS)
        message = f"nothing is scored now: {self._stalled}; try again later, or ask another server"
        return UnavailableError(message, code="engine_stalled", retry_after=STALL_RETRY_SECONDS)

    def stall(self, reason: str) -> None:
        self._stalled = reason

    def end_stall(self) -> None:
        self._stalled = None

    def restart(self, reason: str) -> None:
        """The engine is gone for good, and another one takes its place."""
        self._restart = reason

    def fail(self, reason: str) -> None:
        """The first reason stays. Calls the functions given to `when_failed`."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            self.failed.set()
            callbacks = list(self._on_failed)
        for callback in callbacks:
            try:
                callback(reason)
            except Exception:  # must not keep requests from getting their errors
                log.exception("a function that must know of the engine's failure failed")

    def when_failed(self, callback: Callable[[str], None]) -> None:
        """Call the function with the reason when the engine fails, on any thread; now, if it has failed already."""
        with self._lock:
            self._on_failed.append(callback)
            reason = self._failure
        if reason is not None:
            callback(reason)


class StepTimes:
    """How long steps of each size take: the slowest of the latest ones, by the power of two of their tokens."""

    def __init__(self) -> None:
        self._slowest: dict[int, float] = {}  # seconds

    def record(self, num_tokens: int, seconds: float) -> None:
        size = num_tokens.bit_length()
        known = self._slowest.get(size, 0.0)
        self._slowest[size] = max(seconds, known + FASTER_WEIGHT * (seconds - known))

    def expected(self, num_tokens: int) -> float | None:
        """None if no step was measured. A size without a measured step takes no longer than a larger one, and no
        longer per token than a smaller one."""
        size, slowest = num_tokens.bit_length(), dict(self._slowest)
        if size in slowest:
            return slowest[size]
        return min((seconds * 2.0 ** max(0, size - each) for each, seconds in slowest.items()), default=None)


class DeviceWork(Protocol):
    """A step, or anything else that the device must end."""

    @property
    def num_tokens(self) -> int:
        """With padding."""


class BusyDevice(Protocol):
    """What the watchdog sees of the device. Any thread may ask."""

    times: StepTimes

    @property
    def is_compiling(self) -> bool:
        """It waits for a program."""

    def oldest(self) -> DeviceWork | None:
        """What it is busy with."""


class Watchdog:
    """Looks at the oldest work on the device once a second. Work that takes too long stalls the engine, then fails it.

    `timeout`: seconds after which the engine fails; 0: there is no watchdog. Work of a size that takes long gets
    STALL_FACTOR times what is expected of it, if that is more. A program that is compiled takes no time. `wake` is
    called after a change of the state. Time is counted by looks, so a process that was stopped has not hung.
    """

    def __init__(self, health: EngineHealth, device: BusyDevice, timeout: float, wake: Callable[[], None]) -> None:
        self._health = health
        self._device = device
        self._timeout = timeout
        self._wake = wake
        self._watched: DeviceWork | None = None
        self._seconds = 0.0  # that it has taken
        self._stop = threading.Event()
        self._interval = min(CHECK_SECONDS, timeout / 4)
        self._thread = threading.Thread(target=self._run, name="prefixwise-watchdog", daemon=True)

    def start(self) -> None:
        if self._timeout:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._timeout:
            self._thread.join()

    def _run(self) -> None:
        last = monotonic()
        while not self._stop.wait(self._interval) and not self._health.failed.is_set():
            now = monotonic()
            self.look(min(now - last, 2 * self._interval))
            last = now

    def look(self, seconds: float) -> None:
        """`seconds` after the look before."""
        work = self._device.oldest()
        if work is not self._watched:
            self._watched, self._seconds = work, 0.0
            if self._health.state is EngineState.STALLED:
                self._health.end_stall()
                self._wake()
        elif work is not None and not self._device.is_compiling:
            self._seconds += seconds
            self._judge(work)

    def _judge(self, work: DeviceWork) -> None:
        expected = self._device.times.expected(work.num_tokens)
        generous = STALL_FACTOR * (expected or 0.0)
        most = max(self._timeout, generous)
        if self._seconds <= (most if expected is None else min(most, max(STALL_SECONDS, generous))):
            return
        usual = "" if expected is None else f", and usually takes {expected:.2g} s"
        reason = f"the device has been busy with a step of {work.num_tokens} tokens for {self._seconds:.3g} s{usual}"
        if self._seconds > most:
            self._health.fail(reason)
        else:
            self._health.stall(reason)
        self._wake()
