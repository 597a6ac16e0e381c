"""A sweep over the server's chunk sizes on a target: one call of the agent for every size.

A size that fails gives a row with the error, and the sweep continues. If the sweep itself fails (lost connection, full
disk, Ctrl-C), completed rows remain, and a second call with the same folder resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from prefixwise.bench.kinds.ops import OpsRow
from prefixwise.bench.remote.agent_client import RemoteAgent, answer_field, new_token, parse_row, released_after
from prefixwise.bench.remote.spec import SweepSpec


@dataclass(frozen=True)
class Watcher:
    """Callbacks for the progress of a run."""

    step: Callable[[str], None]
    line: Callable[[str], None]
    begun: Callable[[str], None] = lambda folder: None  # called with the folder as soon as the run can be resumed


@dataclass(frozen=True)
class SweepResult:
    """All rows, in the order of the sizes, and their folder on the target."""

    folder: str
    rows: list[OpsRow]

    @property
    def succeeded(self) -> bool:
        return any(row.status == "ok" for row in self.rows)


def run_sweep(agent: RemoteAgent, spec: SweepSpec, watcher: Watcher, *, take_over: bool = False) -> SweepResult:
    """Measure all missing sizes. Raises TargetError if the target cannot measure any more."""
    who, spec = agent.target.name, replace(spec, run=new_token())
    agent.call("clean", *(("--take-over", "yes") if take_over else ()), on_line=watcher.line)
    with released_after(agent, spec.run):
        first = replace(spec, take_over=take_over)
        begun = agent.call("begin", "--spec", first.to_line(), on_line=watcher.line)
        spec = replace(spec, folder=str(answer_field(begun, "folder", who)), new_folder=False)
        watcher.begun(spec.folder)
        done = {row.chunk_size: row for row in (parse_row(each, who) for each in answer_field(begun, "done", who))}
        rows = [_row(agent, spec, size, done.get(size), watcher) for size in spec.chunk_sizes]
    return SweepResult(spec.folder, rows)


def _row(agent: RemoteAgent, spec: SweepSpec, size: int, done: OpsRow | None, watcher: Watcher) -> OpsRow:
    if done is not None:
        watcher.step(f"chunk size {size}: already measured")
        return done
    watcher.step(f"chunk size {size}")
    answer = agent.call("chunk", "--spec", spec.to_line(), "--size", str(size), on_line=watcher.line)
    return parse_row(answer, agent.target.name)
