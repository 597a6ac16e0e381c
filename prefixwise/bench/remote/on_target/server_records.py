"""Servers that a run has started, on record, so that the next run finds and stops what a killed run has left.

A record is a file in `~/.prefixwise/servers`, written as soon as the process exists and removed when it has ended. A
process is identified by its id and its start time, because ids are reused.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefixwise.bench.files import now_utc, write_text
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.host import process_start, this_boot

_GRACE_SECONDS = 15.0


@dataclass(frozen=True)
class Process:
    """One process, identified for all time."""

    process_id: int
    started: str  # as the system reports it; a later process with this id has another

    @classmethod
    def of(cls, process_id: int) -> Process | None:
        """None if there is no such process."""
        started = process_start(process_id)
        return None if started is None else cls(process_id, started)

    @property
    def is_running(self) -> bool:
        return process_start(self.process_id) == self.started

    def stop(self) -> bool:
        """Send SIGTERM, then SIGKILL; to its group if it leads one, as a server does. True if it has ended."""
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
    """A server and its agent."""

    server: Process
    agent: Process
    run: str  # the folder of its run
    since: str
    machine: str  # process ids are valid on one machine only, and the home folder may be shared


def records_folder() -> Path:
    """Of this user on this machine."""
    return Path(os.environ.get("PREFIXWISE_HOME", "~/.prefixwise")).expanduser() / "servers"


class ServerRecord:
    """The record of one server, while it may run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._path: Path | None = None
        self._server: Process | None = None

    def begin(self, process_id: int) -> None:
        server, agent = Process.of(process_id), Process.of(os.getpid())
        if server is None or agent is None:  # it has ended already
            return
        self._server = server
        record = RunningRecord(server, agent, self._run, now_utc(), this_boot())
        self._path = records_folder() / f"{socket.gethostname()}-{process_id}.json"
        write_text(self._path, json.dumps(asdict(record)) + "\n")

    def end(self) -> None:
        """Remove the record, unless the server still runs: then the next run finds it."""
        if self._path is not None and not (self._server and self._server.is_running):
            self._path.unlink(missing_ok=True)


@contextmanager
def on_record(run: str) -> Iterator[ServerRecord]:
    """A record for one server; call its `begin` with the server's process id."""
    record = ServerRecord(run)
    try:
        yield record
    finally:
        record.end()


def left_over() -> list[tuple[Path, RunningRecord]]:
    """The records of servers that run on this machine; records of ended servers are removed."""
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
    """None if the file is not a record, for example after a full disk."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        server, agent = Process(**content["server"]), Process(**content["agent"])
        return RunningRecord(server, agent, str(content["run"]), str(content["since"]), str(content["machine"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def stop_left(say: Callable[[str], None], take_over: bool) -> dict[str, Any]:
    """Stop servers that earlier runs have left; with `take_over`, those of active runs, too. Raises TargetError."""
    stopped = []
    for path, record in left_over():
        where = f"server {record.server.process_id} of {record.run}, started {record.since}"
        if record.agent.is_running and not take_over:
            raise TargetError(f"{where}, is still used by process {record.agent.process_id}: --take-over stops it")
        # The agent first, which stops its server; then the server, if it still runs.
        if not (record.agent.stop() and record.server.stop()):
            raise TargetError(f"{where}, cannot be stopped; its agent is process {record.agent.process_id}")
        path.unlink(missing_ok=True)
        say(f"stopped a server of an earlier run: {where}")
        stopped.append(record.server.process_id)
    return {"stopped": stopped}
