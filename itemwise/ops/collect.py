"""What runs have left on a target: named, and fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from itemwise.ops.folders import check_name
from itemwise.ops.remote_agent import RemoteAgent
from itemwise.ops.targets.base import TargetError


@dataclass(frozen=True)
class RunFolder:
    """One run on the target."""

    name: str
    files: int
    bytes: int
    finished: bool


def list_runs(agent: RemoteAgent, root: str) -> list[RunFolder]:
    """By name. Raises TargetError."""
    return [RunFolder(**each) for each in agent.call("list", "--root", root)["runs"]]


def collect(
    agent: RemoteAgent, root: str, names: Sequence[str], destination: Path, tell: Callable[[str], None]
) -> list[Path]:
    """Every file of these runs, each in a folder of its name. Raises TargetError, ArtifactError."""
    there = {run.name for run in list_runs(agent, root)}
    for name in names:
        if check_name(name) not in there:
            known = ", ".join(sorted(there)) or "none"
            raise TargetError(f"{agent.target.name} has no run {name!r} in {root}; those there are: {known}")
    fetched = []
    for name in names:
        tell(name)
        agent.target.download(f"{root.rstrip('/')}/{name}", destination / name)
        fetched.append(destination / name)
    return fetched
