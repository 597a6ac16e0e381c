"""The progress of a cross-backend comparison: `.compare_backends.json` in its folder, written after every step.

A step is done if its inputs and outputs are byte for byte those of its record. So exactly the steps whose files were
changed or are incomplete run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefixwise._version import __version__
from prefixwise.bench.files import now_utc, read_bytes, sha256_of, write_text
from prefixwise.bench.remote.folders import set_aside
from prefixwise.contract.errors import ArtifactError

STATE_FILE = ".compare_backends.json"


@dataclass
class CompareState:
    """The state of one folder."""

    folder: Path
    arguments: dict[str, Any]
    targets: dict[str, str] = field(default_factory=dict)  # by backend, set by its first matrix
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)  # inputs and outputs: sha256 by file name
    started_at_utc: str = field(default_factory=now_utc)
    prefixwise: str = __version__

    @classmethod
    def open(cls, folder: Path, arguments: Mapping[str, Any], say: Callable[[str], None]) -> CompareState:
        """The state of a new run, or of an earlier one with equal arguments. Writes nothing. Raises ArtifactError."""
        path = folder / STATE_FILE
        state = _read(path, folder, say) if path.exists() else None
        if state is None:
            return cls(folder, dict(arguments))
        _refuse_other(folder, state.arguments, arguments)
        return state

    def check_target(self, backend: str, name: str) -> None:
        """Raises ArtifactError if earlier matrices of this backend were measured on another target."""
        before = self.targets.get(backend, name)
        _refuse_other(self.folder, {f"{backend}_target": before}, {f"{backend}_target": name})

    def record_target(self, backend: str, name: str) -> None:
        """Record the target of the backend's first matrix."""
        if backend not in self.targets:
            self.targets[backend] = name
            self.save()

    def is_done(self, step: str, inputs: Iterable[str], outputs: Iterable[str]) -> bool:
        """Inputs and outputs are names of files in the folder."""
        entry = self.steps.get(step)
        return entry is not None and all(
            entry.get(kind) == _checksums(self.folder, names) for kind, names in (("in", inputs), ("out", outputs))
        )

    def record(self, step: str, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """Record that the step is done; an existing identical record is not written again."""
        inputs, outputs = tuple(inputs), tuple(outputs)
        if self.is_done(step, inputs, outputs):
            return
        checksums = {"in": _checksums(self.folder, inputs), "out": _checksums(self.folder, outputs)}
        self.steps[step] = {**checksums, "finished_at_utc": now_utc()}
        self.save()

    def save(self) -> None:
        content = {
            "prefixwise": self.prefixwise,
            "started_at_utc": self.started_at_utc,
            "arguments": self.arguments,
            "targets": self.targets,
            "steps": self.steps,
        }
        write_text(self.folder / STATE_FILE, json.dumps(content, indent=2) + "\n")


def _read(path: Path, folder: Path, say: Callable[[str], None]) -> CompareState | None:
    """None if the file is invalid: each matrix identifies itself. Raises ArtifactError."""
    content = read_bytes(path)
    try:
        return CompareState(folder=folder, **json.loads(content))
    except (ValueError, TypeError) as error:
        set_aside(path, f"{path} is not the state of a comparison: {error}", say)
        return None


def _refuse_other(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if other:
        differences = "; ".join(f"{name} is {before.get(name)!r} there, {now.get(name)!r} here" for name in other)
        raise ArtifactError(
            f"{folder} contains another comparison: {differences} (--artifact-subdir names another folder)"
        )


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, str | None]:
    return {name: sha256_of(folder / name) if (folder / name).is_file() else None for name in sorted(names)}
