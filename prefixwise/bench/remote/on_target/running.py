"""Servers that a run has started, on record: so that what is left of a run that was killed is found by the next one.

A record is a file in `~/.prefixwise/servers`, written as soon as there is a process and removed when it is gone. A
process is known by its id and its start time, as ids are used again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from prefixwise.bench.files import now_utc, write_text
from prefixwise.host import process_start, this_boot

_GRACE_SECONDS = 15.0


@dataclass(frozen=True)
class Process:
    """One process, now and for ever."""

    process_id: int
    started: str  # in the words of the system; another process with this id has another

    @classmethod
    def of(cls, process_id: int) -> Process | None:
        """None where there is none."""
        started = process_start(process_id)
        return None if started is None else cls(process_id, started)

    @property
    def is_running(self) -> bool:
        return process_start(self.process_id) == self.started

    def stop(self) -> bool:
        """Asked first, then made to; with its group where it leads one, as a server does. Is it gone?"""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.is_running:
                self._send(number)
            until = time.monotonic() + _GRACE_SECONDS
            while self.is_running and time.monotonic() < until:
                time.sleep(0.05)
        return not self.is_running

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if os.getpgid(self.process_id) == self.process_id:
                os.killpg(self.process_id, number)
            else:
                os.kill(self.process_id, number)


@dataclass(frozen=True)
class RunningRecord:
    """A server, and the agent that looks after it."""

    server: Process
    agent: Process
    run: str  # the folder of its run
    since: str
    machine: str  # process ids of another one mean nothing here, though the home may be shared


def records_folder() -> Path:
    """Of this user on this machine."""
    return Path(os.environ.get("PREFIXWISE_HOME", "~/.prefixwise")).expanduser() / "servers"


class ServerRecord:
    """One record, for as long as its server may run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._path: Path | None = None
        self._server: Process | None = None

    def begin(self, process_id: int) -> None:
        server, agent = Process.of(process_id), Process.of(os.getpid())
        if server is None or agent is None:  # it is gone already
            return
        self._server = server
        record = RunningRecord(server, agent, self._run, now_utc(), this_boot())
        self._path = records_folder() / f"{socket.gethostname()}-{process_id}.json"
        write_text(self._path, json.dumps(asdict(record)) + "\n")

    def end(self) -> None:
        """It stays where the server does, so that the next run finds that."""
        if self._path is not None and not (self._server and self._server.is_running):
            self._path.unlink(missing_ok=True)


@contextmanager
def on_record(run: str) -> Iterator[ServerRecord]:
    """Call its `begin` with the server's process id."""
    record = ServerRecord(run)
    try:
        yield record
    finally:
        record.end()


def left_over() -> list[tuple[Path, RunningRecord]]:
    """All records of servers that run on this machine; those of servers that do not are removed."""
    found = []
    for path in sorted(records_folder().glob("*.json")):
        record = _read(path)
        if record is not None and record.machine != this_boot():
            continue
        if record is None or not record.server.is_running:
            path.unlink(missing_ok=True)
        else:
            found.append((path, record))
    return found


def _read(path: Path) -> RunningRecord | None:
    """None for what is no record: half written by a full disk, say."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        server, agent = Process(**content["server"]), Process(**content["agent"])
        return RunningRecord(server, agent, str(content["run"]), str(content["since"]), str(content["machine"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
