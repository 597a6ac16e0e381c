"""A sweep over the server's chunk sizes on a target, from here: one call of the agent for every size.

A size that fails is a row that says why, and the sweep goes on. What ends the sweep (the connection, a full disk,
Ctrl-C) leaves the rows that are done, and a second call with the same folder goes on from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from itemwise.harness.artifacts import OpsRow
from itemwise.ops.remote_agent import RemoteAgent
from itemwise.ops.spec import SweepSpec


@dataclass(frozen=True)
class Watcher:
    """Who is told how it goes."""

    step: Callable[[str], None]
    line: Callable[[str], None]


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
    agent.call("clean", *(("--take-over", "yes") if take_over else ()), on_line=watcher.line)
    begun = agent.call("begin", "--spec", spec.to_line(), on_line=watcher.line)
    kept = {row.chunk_size: row for row in map(OpsRow.model_validate, begun["kept"])}
    rows = [_row(agent, spec, size, kept.get(size), watcher) for size in spec.chunk_sizes]
    return SweepResult(str(begun["folder"]), rows)


def _row(agent: RemoteAgent, spec: SweepSpec, size: int, kept: OpsRow | None, watcher: Watcher) -> OpsRow:
    if kept is not None:
        watcher.step(f"chunk size {size} kept")
        return kept
    watcher.step(f"chunk size {size}")
    answer: dict[str, Any] = agent.call("chunk", "--spec", spec.to_line(), "--size", str(size), on_line=watcher.line)
    return OpsRow.model_validate(answer)
