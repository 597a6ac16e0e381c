"""Lists and fetches the artifacts of runs on a target."""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.ops import OpsRunMetadata
from prefixwise.bench.remote.agent_client import RemoteAgent, answer_field
from prefixwise.bench.remote.folders import METADATA, check_name
from prefixwise.bench.remote.targets.base import Target, TargetError
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.bench.remote.targets.transfer import replace_whole
from prefixwise.contract.errors import ArtifactError


@dataclass(frozen=True)
class RunFolder:
    """One run on the target."""

    name: str
    files: int
    bytes: int
    finished: bool


def list_runs(agent: RemoteAgent, root: str) -> list[RunFolder]:
    """The runs on the target, by name. Raises TargetError."""
    who, names = agent.target.name, [each.name for each in fields(RunFolder)]
    runs = answer_field(agent.call("list", "--root", root), "runs", who)
    return [RunFolder(**{name: answer_field(each, name, who) for name in names}) for each in runs]


def collect(
    agent: RemoteAgent,
    root: str,
    names: Sequence[str],
    destination: Path,
    on_run: Callable[[str], None],
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Fetch all files of these runs, each run into a folder of its name. Raises TargetError, ArtifactError.

    An existing folder of the same run is replaced as a whole; one of another run only with `overwrite`.
    """
    there = {run.name for run in list_runs(agent, root)}
    for name in names:
        if check_name(name) not in there:
            known = ", ".join(sorted(there)) or "none"
            raise TargetError(f"{agent.target.name} has no run {name!r} in {root}; existing runs: {known}")
    fetched = []
    for name in names:
        on_run(name)
        _fetch(agent.target, f"{root.rstrip('/')}/{name}", destination / name, overwrite=overwrite)
        fetched.append(destination / name)
    return fetched


def _fetch(target: Target, source: str, place: Path, *, overwrite: bool) -> None:
    """Fetch to a temporary folder first, to compare it with the existing one."""
    if target.name == LocalTarget.name and Path(source).expanduser().resolve() == place.resolve():
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".collect-") as folder:
            fetched = Path(folder) / place.name
            target.download(source, fetched)
            if place.exists() and not overwrite:
                _refuse_other(place, fetched)
            replace_whole(fetched, place)
    except OSError as error:
        raise TargetError(f"{place} cannot be written: {error.strerror or error}") from None


def _refuse_other(place: Path, fetched: Path) -> None:
    """Raises ArtifactError if a local file would be lost."""
    here, there = _files(place), _files(fetched)
    lost = sorted(here - there)
    if not place.is_dir() or lost:
        problem = f"has {', '.join(lost[:3])}, which the run there does not" if lost else "is not a folder"
        raise ArtifactError(f"{place} {problem}: --overwrite replaces it, --destination names another folder")
    if _identity(place) is not None and _identity(place) == _identity(fetched):
        return
    other = sorted(name for name in here if not filecmp.cmp(place / name, fetched / name, shallow=False))
    if other:
        problem = f"is of another run than the one there: {', '.join(other[:3])} differs"
        raise ArtifactError(f"{place} {problem}: --overwrite replaces it, --destination names another folder")


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _identity(folder: Path) -> tuple[object, ...] | None:
    """What all copies of one sweep share, also with more sizes. None if the metadata does not have it."""
    try:
        metadata = read_artifact(folder / METADATA, OpsRunMetadata)
    except ArtifactError:
        return None
    if metadata.timestamp_start is None or metadata.spec is None:
        return None
    return metadata.timestamp_start, {name: each for name, each in metadata.spec.items() if name != "chunk_sizes"}
