"""A lock for one run at a time on a machine: two runs would disturb each other's measurements.

A run is identified by a token of its caller. `~/.prefixwise/run-HOST.json` records the run that holds the lock, its
last agent, and the time. An agent holds the lock while it works and refreshes the record every few seconds. Between two
calls of a run no agent works, so the lock lapses only after some seconds: an interrupted run frees the machine by
itself.
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
from prefixwise.bench.remote.on_target.server_records import Process, records_folder
from prefixwise.bench.remote.spec import Spec
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.contract.errors import ArtifactError
from prefixwise.host import this_boot

LAPSE_SECONDS = 15.0
_REFRESH_SECONDS = 3.0


@dataclass(frozen=True)
class Holder:
    """The run that holds the lock."""

    token: str
    agent: Process  # its last agent
    run: str  # its folder
    since: str
    seen: float  # seconds of the machine's clock
    machine: str  # several machines may share the home folder

    @property
    def is_there(self) -> bool:
        """True if the lock is still valid. A clock that was set back must not hold it forever."""
        is_seen = self.agent.is_running or abs(time.time() - self.seen) < LAPSE_SECONDS
        return is_seen and self.machine == this_boot()

    @property
    def description(self) -> str:
        return f"{self.run}, started {self.since} by {self.token}, process {self.agent.process_id} on this machine"


def lock_file() -> Path:
    """Of this user on this machine."""
    return records_folder().parent / f"run-{socket.gethostname()}.json"


def holder() -> Holder | None:
    """None if the lock is free, or its file is not a record."""
    try:
        content = json.loads(lock_file().read_text(encoding="utf-8"))
        return Holder(**{**content, "agent": Process(**content["agent"]), "seen": float(content["seen"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def take(token: str, run: str, *, take_over: bool = False) -> None:
    """Take the lock for the run of this token, which may hold it already. Raises TargetError if another run holds it.

    `take_over` stops that run's agent; its caller gets the error on its next call.
    """
    other = _take_from(token, run, None)
    if other is None:
        return
    if not take_over:
        raise TargetError(f"another run is active on this machine: {other.description} (--take-over stops it)")
    if other.agent.is_running and other.agent.process_id != os.getpid():
        other.agent.stop()
    again = _take_from(token, run, other.token)
    if again is not None:
        raise TargetError(f"another run took this machine over first: {again.description}")


def _take_from(token: str, run: str, owner: str | None) -> Holder | None:
    """None if the lock is now ours, else its holder. `owner`: a token that the lock may be taken from."""
    with _exclusive():
        before = holder()
        if before is not None and before.token not in (token, owner) and before.is_there:
            return before
        since = before.since if before is not None and before.token == token else now_utc()
        _write(token, run, since)
    return None


def _write(token: str, run: str, since: str) -> None:
    agent = Process.of(os.getpid())
    assert agent is not None, "this process runs"
    record = Holder(token, agent, run, since, time.time(), this_boot())
    write_text(lock_file(), json.dumps(asdict(record)) + "\n")


def refresh(token: str) -> None:
    """Extend the lock, unless another run has taken it."""
    with _exclusive():
        before = holder()
        if before is not None and before.token == token:
            _write(token, before.run, before.since)


def release(token: str) -> dict[str, Any]:
    """Release the lock if this token holds it."""
    with _exclusive():
        before = holder()
        is_ours = before is not None and before.token == token
        if is_ours:
            lock_file().unlink(missing_ok=True)
    return {"released": is_ours}


@contextmanager
def held(spec: Spec, run: str) -> Iterator[None]:
    """Hold the lock while the block runs; a signal that ends the agent releases it. Raises TargetError.

    Without a token in the spec no caller can release the lock, so it is released at the end of the block.
    """
    token = spec.run or f"process {os.getpid()}"
    take(token, run, take_over=spec.take_over)
    done = threading.Event()
    refresher = threading.Thread(target=_refresh_until, args=(token, done), daemon=True)
    refresher.start()
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        release(token)
        raise
    finally:
        done.set()
        refresher.join()
        _leave(token, is_over=not spec.run)


def _leave(token: str, *, is_over: bool) -> None:
    with suppress(ArtifactError):  # a full disk: the lock lapses
        release(token) if is_over else refresh(token)


def _refresh_until(token: str, done: threading.Event) -> None:
    while not done.wait(_REFRESH_SECONDS):
        with suppress(ArtifactError, OSError):
            refresh(token)


@contextmanager
def _exclusive() -> Iterator[None]:
    """Exclude other processes from the record while the block runs; the system unlocks it when the process ends."""
    path = lock_file().with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
