"""Before a comparison of backends measures anything: both targets are there, and have what they need.

What would fail after hours of measuring on the other machine fails now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwise._version import __version__
from prefixwise.bench.artifacts import BackendName
from prefixwise.bench.remote.answers import told
from prefixwise.bench.remote.compare.plan import PACKAGES
from prefixwise.bench.remote.doctor.diagnosis import require_accelerator
from prefixwise.bench.remote.remote_agent import RemoteAgent
from prefixwise.bench.remote.targets.base import OnLine, TargetError


@dataclass(frozen=True)
class CompareSide:
    """One backend, where it runs, and on which accelerator it must; None: on any device."""

    backend: BackendName
    agent: RemoteAgent
    accelerator: str | None = None


def check_sides(sides: Sequence[CompareSide], folder: str, model: str, line: OnLine, *, take_over: bool) -> None:
    """Raises TargetError. Servers that an earlier run has left are stopped first: one may hold the device."""
    asked: dict[tuple[str, str], Mapping[str, Any]] = {}  # one machine may be both sides
    for side in sides:
        place = (side.agent.target.name, side.agent.python)
        if place not in asked:
            asked[place] = _ask(side.agent, folder, model, line, take_over=take_over)
        check_facts(side, asked[place])


def _ask(agent: RemoteAgent, folder: str, model: str, line: OnLine, *, take_over: bool) -> Mapping[str, Any]:
    name = agent.target.name
    agent.target.check_reachable()
    agent.call("clean", *(("--take-over", "yes") if take_over else ()), on_line=line)
    facts = agent.call("facts", "--folder", folder, "--model", model, "--port", "0")
    devices, words = told(facts, "devices", name), told(facts, "model", name)
    line(f"{name}: prefixwise {told(facts, 'prefixwise', name)}, {', '.join(devices) or 'no device'}")
    if words is not None:
        line(f"{name}: {model}: {words}")
    return facts


def check_facts(side: CompareSide, facts: Mapping[str, Any]) -> None:
    """Raises TargetError."""
    name, package = side.agent.target.name, PACKAGES[side.backend]
    mend = f"prefixwise ops install --target {name} mends it"
    version = told(facts, "prefixwise", name)
    if version != __version__:
        raise TargetError(f"{name}: expected prefixwise {__version__} as here, got {version} ({mend})")
    if not told(facts, "packages", name).get(package):
        raise TargetError(f"{name}: {package} is not installed for {side.agent.python}: {side.backend} needs it")
    if not told(facts, "is_writable", name):
        raise TargetError(f"{name}: the folder for artifacts cannot be written")
    if side.accelerator is not None:
        try:
            require_accelerator(facts, side.accelerator, package)
        except TargetError as error:
            raise TargetError(f"{name}, for {side.backend}: {error}") from None
