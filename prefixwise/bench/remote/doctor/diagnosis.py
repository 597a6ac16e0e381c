"""What a target lacks, found out before anything runs there.

    the way there  ->  plain sh  ->  its interpreter  ->  the agent
    reachable          python        prefixwise             device, accelerator
                       disk, folder  packages, backend    port, model

What an earlier question left open, later checks cannot say: they are `unknown`.
"""

from __future__ import annotations

import json

from prefixwise.bench.remote.doctor.bare import ask_bare
from prefixwise.bench.remote.doctor.checkup import (
    BACKENDS,
    PACKAGES,
    Check,
    Findings,
    Inside,
    Wanted,
    all_checks,
    require_accelerator,
)
from prefixwise.bench.remote.remote_agent import RemoteAgent
from prefixwise.bench.remote.targets.base import ConnectionLostError, Target, TargetError

__all__ = ["Check", "Wanted", "diagnose", "require_accelerator"]

# For an interpreter that may have nothing of ours: only what every Python has.
_QUESTION = """
import importlib.util, json, sys
def has(name):
    return importlib.util.find_spec(name) is not None
told = {"packages": [name for name in sys.argv[1:] if has(name)], "version": None, "file": None}
if has("prefixwise"):
    import prefixwise
    told["version"], told["file"] = getattr(prefixwise, "__version__", None), prefixwise.__file__
print(json.dumps(told))
"""


def diagnose(target: Target, wanted: Wanted) -> list[Check]:
    """All checks. A target that cannot be reached is one that failed, and raises nothing."""
    found = Findings(target.name, wanted.python or target.default_python)
    try:
        target.check_reachable()
        found.bare = ask_bare(target, wanted.artifact_root, [found.python])
        _look_inside(target, found, wanted)
    except TargetError as error:
        found.unreachable = str(error)
    return all_checks(found, wanted)


def _look_inside(target: Target, found: Findings, wanted: Wanted) -> None:
    """Raises ConnectionLostError; all else that fails is a finding."""
    try:
        found.inside = _ask_interpreter(target, found.python)
        if found.inside.can_answer:
            arguments = ("--folder", wanted.artifact_root, "--model", wanted.model, "--port", str(wanted.port))
            found.facts = RemoteAgent.on(target, found.python).call("facts", *arguments)
    except ConnectionLostError:
        raise
    except TargetError as error:
        found.inside_problem = str(error)


def _ask_interpreter(target: Target, python: str) -> Inside:
    """Raises TargetError where it does not run."""
    done = target.run([python, "-c", _QUESTION, *PACKAGES, *BACKENDS])
    if done.status != 0:
        raise TargetError(f"{python} does not run: {done.words}")
    try:
        told = json.loads(done.last_line)
    except ValueError:
        raise TargetError(f"{python}: expected a line of JSON, got {done.last_line[:200]!r}") from None
    return Inside(told["version"], told["file"], frozenset(told["packages"]))
