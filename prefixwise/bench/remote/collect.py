"""What runs have left on a target: named, and fetched."""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from prefixwise.bench.artifacts import OpsRunMetadata
from prefixwise.bench.files import read_artifact
from prefixwise.bench.remote.answers import told
from prefixwise.bench.remote.folders import METADATA, check_name
from prefixwise.bench.remote.remote_agent import RemoteAgent
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
    """By name. Raises TargetError."""
    who, names = agent.target.name, [each.name for each in fields(RunFolder)]
    runs = told(agent.call("list", "--root", root), "runs", who)
    return [RunFolder(**{name: told(each, name, who) for name in names}) for each in runs]


def collect(
    agent: RemoteAgent,
    root: str,
    names: Sequence[str],
    destination: Path,
    tell: Callable[[str], None],
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Every file of these runs, each in a folder of its name. Raises TargetError, ArtifactError.

    A folder that is here is replaced, whole, where it is of the same run; of another, it is only with `overwrite`.
    """
    there = {run.name for run in list_runs(agent, root)}
    for name in names:
        if check_name(name) not in there:
            known = ", ".join(sorted(there)) or "none"
            raise TargetError(f"{agent.target.name} has no run {name!r} in {root}; those there are: {known}")
    fetched = []
    for name in names:
        tell(name)
        _fetch(agent.target, f"{root.rstrip('/')}/{name}", destination / name, overwrite=overwrite)
        fetched.append(destination / name)
    return fetched


def _fetch(target: Target, source: str, place: Path, *, overwrite: bool) -> None:
    """Beside the place first, as only what has come can be compared with what is here."""
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
    """Raises ArtifactError where something here would be lost."""
    here, came = _files(place), _files(fetched)
    lost = sorted(here - came)
    if not place.is_dir() or lost:
        words = f"has {', '.join(lost[:3])}, which the run there has not" if lost else "is no folder"
        raise ArtifactError(f"{place} {words}: --overwrite replaces it, --destination takes another folder")
    if _identity(place) is not None and _identity(place) == _identity(fetched):
        return
    other = sorted(name for name in here if not filecmp.cmp(place / name, fetched / name, shallow=False))
    if other:
        words = f"is of another run than the one there, by {', '.join(other[:3])}"
        raise ArtifactError(f"{place} {words}: --overwrite replaces it, --destination takes another folder")


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _identity(folder: Path) -> tuple[object, ...] | None:
    """What two copies of one sweep share, also where one has more sizes. None where it does not say."""
    try:
        metadata = read_artifact(folder / METADATA, OpsRunMetadata)
    except ArtifactError:
        return None
    if metadata.started_at_utc is None or metadata.spec is None:
        return None
    return metadata.started_at_utc, {name: each for name, each in metadata.spec.items() if name != "chunk_sizes"}
