"""The supervisor's children: how one is forked, what is known of it, and how often one may die."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from prefixwise.contract.errors import BackendError
from prefixwise.host import NO_THREAD, lacks_threads
from prefixwise.server.logs import flush_log
from prefixwise.server.usage import Elapsed, Silence, Usage
from prefixwise.server.workers.channel import Channel, EngineUp
from prefixwise.server.workers.messages import Fault

log = logging.getLogger("prefixwise")

MAX_DEATHS = 3
DEATH_SECONDS = 60.0
OPENING_SECONDS = 300.0  # that a worker may take to open, at least: a load may be slow, and keep the interpreter lock
LOADING_SECONDS = 60.0  # between two lines of the log that the engine process is still loading: nothing bounds that
_WORKER_SECONDS = 60.0  # most that a worker may be silent: it has no device that takes long


@dataclass(eq=False)
class Child:
    """A process, and the supervisor's end of its channel."""

    name: str  # for the log
    number: int | None  # of a worker; None: the engine process
    pid: int
    channel: Channel
    is_ready: bool = False
    was_ready: bool = False  # also where the engine of a worker has ended since
    is_drained: bool = False
    fault: Fault | None = None  # it cannot load what it needs
    loading: Elapsed = field(default_factory=Elapsed)  # of the engine process: since it was started
    opening: Elapsed | None = None  # of a worker: since it could open, until it is ready for the first time
    silence: Silence | None = None  # from its readiness until it is killed

    @property
    def identity(self) -> str:
        """Of a worker's socket."""
        return f"{self.number}-{self.pid}"

    def open(self, engine: EngineUp) -> None:
        """Tell a worker that it can open."""
        self.channel.send(engine)
        self.opening = None if self.was_ready else Elapsed()

    def lose_engine(self) -> None:
        """A worker waits for the next engine process."""
        self.is_ready, self.opening = False, None

    def become_ready(self, usage: Usage) -> None:
        """`usage`: its own, where it counts its heartbeats."""
        self.opening = None
        self.silence = self.silence or Silence(usage)
        self.is_ready = self.was_ready = True

    def watch(self, watchdog_timeout: float) -> None:
        """Kill it if it is silent, or opens, for too long; 0: never. Log now and then that it is loading."""
        if self.number is None and not self.was_ready:
            self._watch_loading()
        if self.opening is not None:
            self._watch_opening(self.opening, watchdog_timeout)
        if self.silence is not None:
            self._watch_silence(self.silence, watchdog_timeout)

    def _watch_loading(self) -> None:
        num_logged = self.loading.seconds // LOADING_SECONDS
        self.loading.look()
        if self.loading.seconds // LOADING_SECONDS > num_logged:
            log.info("%s is still loading after %.0f s", self.name, self.loading.seconds)

    def _watch_opening(self, opening: Elapsed, watchdog_timeout: float) -> None:
        opening.look()
        if watchdog_timeout > 0 and opening.seconds > max(watchdog_timeout, OPENING_SECONDS):
            log.error("%s is not ready after %.3g s: killed", self.name, opening.seconds)
            self.opening = None
            self.kill()

    def _watch_silence(self, silence: Silence, watchdog_timeout: float) -> None:
        """Log when it stops to answer, and when it answers again."""
        was_long = silence.is_long
        silence.look()
        if silence.is_long and not was_long:
            log.error("%s has not answered for %.3g s", self.name, silence.seconds)
        elif was_long and not silence.is_long:
            log.info("%s answers again", self.name)
        if silence.is_fatal(watchdog_timeout if self.number is None else min(watchdog_timeout, _WORKER_SECONDS)):
            log.error("%s has not answered for %.3g s: killed", self.name, silence.seconds)
            self.silence = None
            self.kill()

    def describe_end(self, status: int) -> str:
        """How it has ended, for the log and for clients."""
        how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        return f"{self.name} has ended with {how}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@dataclass
class Deaths:
    """The deaths of one of the children. One that never became ready died in vain, however long that took."""

    _times: list[float] = field(default_factory=list)
    _in_vain: int = 0  # one after the other

    def count(self, now: float, *, was_ready: bool) -> str | None:
        """One more. Says how many there are, if they are too many."""
        self._times = [time for time in self._times if now - time < DEATH_SECONDS] + [now]
        self._in_vain = 0 if was_ready else self._in_vain + 1
        if len(self._times) >= MAX_DEATHS:
            return f"{len(self._times)} times in {DEATH_SECONDS:g} s"
        return f"{self._in_vain} times without becoming ready" if self._in_vain >= MAX_DEATHS else None


def fork(name: str, number: int | None, main: Callable[[Channel], int]) -> Child:
    """Start a process that runs `main` with its end of the channel, and exits with the status that it returns.

    The supervisor's one other thread is the log's, which holds nothing that a child needs: it gets a log of its own.
    Raises BackendError if the machine has no room for a process, or this process not for its channel.
    """
    ends: tuple[Channel, ...] = ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads in a process that forks
        try:
            ours, theirs = ends = Channel.pair()
            pid = os.fork()
        except OSError as error:
            for end in ends:
                end.close()
            message = f"{name} cannot be started: {error.strerror}; it needs memory, room for a process (ulimit -u)"
            raise BackendError(f"{message} and for open files (ulimit -n)") from None
    if not pid:
        ours.close()
        _run(name, theirs, main)
    theirs.close()
    ours.socket.setblocking(False)
    log.info("started %s, process %d", name, pid)
    return Child(name, number, pid, ours)


def _run(name: str, channel: Channel, main: Callable[[Channel], int]) -> NoReturn:
    """In the child. Its end is `os._exit`: nothing of the supervisor's is to be cleaned up here."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)  # the handlers do nothing, and stay; programs that the child starts have none
        status = main(channel)
    except BaseException as error:
        if lacks_threads(error):
            log.error("%s has failed: %s", name, NO_THREAD)
        else:
            log.exception("%s has failed", name)
    finally:
        flush_log()
        os._exit(status)
