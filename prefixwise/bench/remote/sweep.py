"""A sweep over the server's chunk sizes on a target, from here: one call of the agent for every size.

A size that fails is a row that says why, and the sweep goes on. What ends the sweep (the connection, a full disk,
Ctrl-C) leaves the rows that are done, and a second call with the same folder goes on from them.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from prefixwise.bench.artifacts import OpsRow
from prefixwise.bench.remote.answers import row_of, told
from prefixwise.bench.remote.remote_agent import RemoteAgent
from prefixwise.bench.remote.spec import SweepSpec
from prefixwise.bench.remote.targets.base import ConnectionLostError, TargetError


@dataclass(frozen=True)
class Watcher:
    """Who is told how it goes."""

    step: Callable[[str], None]
    line: Callable[[str], None]
    begun: Callable[[str], None] = lambda folder: None  # from here on there is something to go on with


@dataclass(frozen=True)
class SweepResult:
    """All rows, in the order of the sizes, and where they are on the target."""

    folder: str
    rows: list[OpsRow]

    @property
    def succeeded(self) -> bool:
        return any(row.status == "ok" for row in self.rows)


def run_sweep(agent: RemoteAgent, spec: SweepSpec, watcher: Watcher, *, take_over: bool = False) -> SweepResult:
    """Raises TargetError where nothing more can be measured."""
    who, spec = agent.target.name, replace(spec, run=new_token())
    agent.call("clean", *(("--take-over", "yes") if take_over else ()), on_line=watcher.line)
    with released_after(agent, spec.run):
        first = replace(spec, take_over=take_over)
        begun = agent.call("begin", "--spec", first.to_line(), on_line=watcher.line)
        spec = replace(spec, folder=str(told(begun, "folder", who)), new_folder=False)
        watcher.begun(spec.folder)
        kept = {row.chunk_size: row for row in (row_of(each, who) for each in told(begun, "kept", who))}
        rows = [_row(agent, spec, size, kept.get(size), watcher) for size in spec.chunk_sizes]
    return SweepResult(spec.folder, rows)


def new_token() -> str:
    """Of a run, for the lock of its target: it says where the run is, and is never made twice."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@contextmanager
def released_after(agent: RemoteAgent, token: str) -> Iterator[None]:
    """The lock of the target, however the run ends. One that cannot be reached has noticed, and does it itself."""
    is_lost = False
    try:
        yield
    except ConnectionLostError:
        is_lost = True
        raise
    finally:
        if not is_lost:
            with suppress(TargetError):
                agent.call("release", "--token", token)


def _row(agent: RemoteAgent, spec: SweepSpec, size: int, kept: OpsRow | None, watcher: Watcher) -> OpsRow:
    if kept is not None:
        watcher.step(f"chunk size {size} kept")
        return kept
    watcher.step(f"chunk size {size}")
    answer = agent.call("chunk", "--spec", spec.to_line(), "--size", str(size), on_line=watcher.line)
    return row_of(answer, agent.target.name)
