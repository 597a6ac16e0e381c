"""One run at a time on a machine: two would measure each other.

A run is known by a token that its caller makes. `~/.prefixwise/run-HOST.json` says which run has the machine, which
agent last worked for it, and when. An agent holds the lock while it works and says so every few seconds; between two
calls of a run nobody works, so it stays the run's for some seconds more, and then lapses: what was cut off frees the
machine by itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefixwise.bench.files import now_utc, write_text
from prefixwise.bench.remote.on_target.running import Process, records_folder
from prefixwise.bench.remote.spec import Spec
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.contract.errors import ArtifactError
from prefixwise.host import this_boot

LAPSE_SECONDS = 15.0
_REFRESH_SECONDS = 3.0


@dataclass(frozen=True)
class Holder:
    """The run that has the machine."""

    token: str
    agent: Process  # that worked for it last
    run: str  # its folder
    since: str
    seen: float  # seconds of the machine's clock
    machine: str  # the home may be shared with others

    @property
    def is_there(self) -> bool:
        """A clock that was set back must not hold a lock for ever."""
        is_seen = self.agent.is_running or abs(time.time() - self.seen) < LAPSE_SECONDS
        return is_seen and self.machine == this_boot()

    @property
    def words(self) -> str:
        return f"{self.run}, begun {self.since} by {self.token}, process {self.agent.process_id} here"


def lock_file() -> Path:
    """Of this user on this machine."""
    return records_folder().parent / f"run-{socket.gethostname()}.json"


def holder() -> Holder | None:
    """None where nobody has it, and where the file is no record."""
    try:
        content = json.loads(lock_file().read_text(encoding="utf-8"))
        return Holder(**{**content, "agent": Process(**content["agent"]), "seen": float(content["seen"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def take(token: str, run: str, *, take_over: bool = False) -> None:
    """For the run of this token, which may have it already. Raises TargetError where it is somebody else's.

    `take_over` ends the agent of that run; its caller is told so by the next call that it makes.
    """
    other = _take_from(token, run, None)
    if other is None:
        return
    if not take_over:
        raise TargetError(f"another run is under way on this machine: {other.words} (--take-over ends it)")
    if other.agent.is_running and other.agent.process_id != os.getpid():
        other.agent.stop()
    again = _take_from(token, run, other.token)
    if again is not None:
        raise TargetError(f"another run took this machine over first: {again.words}")


def _take_from(token: str, run: str, owner: str | None) -> Holder | None:
    """None where it is ours now, else who has it. `owner`: whose it may be taken from."""
    with _alone():
        before = holder()
        if before is not None and before.token not in (token, owner) and before.is_there:
            return before
        since = before.since if before is not None and before.token == token else now_utc()
        _write(token, run, since)
    return None


def _write(token: str, run: str, since: str) -> None:
    agent = Process.of(os.getpid())
    assert agent is not None, "we run"
    record = Holder(token, agent, run, since, time.time(), this_boot())
    write_text(lock_file(), json.dumps(asdict(record)) + "\n")


def refresh(token: str) -> None:
    """It is still needed. Where it is somebody else's by now, it stays so."""
    with _alone():
        before = holder()
        if before is not None and before.token == token:
            _write(token, before.run, before.since)


def release(token: str) -> dict[str, Any]:
    """The run is over; one of another token is not."""
    with _alone():
        before = holder()
        is_ours = before is not None and before.token == token
        if is_ours:
            lock_file().unlink(missing_ok=True)
    return {"released": is_ours}


@contextmanager
def held(spec: Spec, run: str) -> Iterator[None]:
    """While the agent works; what ends the agent frees the machine. Raises TargetError.

    A spec without a token is of nobody who could release it: it is done at the end.
    """
    token = spec.run or f"process {os.getpid()}"
    take(token, run, take_over=spec.take_over)
    done = threading.Event()
    keeper = threading.Thread(target=_keep, args=(token, done), daemon=True)
    keeper.start()
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        release(token)
        raise
    finally:
        done.set()
        keeper.join()
        _leave(token, is_over=not spec.run)


def _leave(token: str, *, is_over: bool) -> None:
    with suppress(ArtifactError):  # a full disk: it lapses
        release(token) if is_over else refresh(token)


def _keep(token: str, done: threading.Event) -> None:
    while not done.wait(_REFRESH_SECONDS):
        with suppress(ArtifactError, OSError):
            refresh(token)


@contextmanager
def _alone() -> Iterator[None]:
    """No other process reads or writes the record meanwhile. The system ends this with the process."""
    path = lock_file().with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
