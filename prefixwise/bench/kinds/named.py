"""Artifacts of one kind side by side, each with the name of its backend or of its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.server_facts import server_fact

Kind = TypeVar("Kind", bound=Artifact)


_BACKENDS = {"jax": "JAX", "pytorch": "PyTorch", "torch": "PyTorch"}


# What a file's name says about its kind rather than about what it is of.
_KINDS = {"multi", "vs", "serial", "eval", "results", "parity", "gate", "gates", "load", "open", "closed", "ab"}


@dataclass(frozen=True)
class Named(Generic[Kind]):
    """One file, read."""

    name: str
    content: Kind


def read_named(
    paths: Sequence[Path], kind: type[Kind], backend_of: Callable[[Kind], str | None] = lambda content: None
) -> list[Named[Kind]]:
    """Read files, named by backend where the content has it, else by file name. Raises ArtifactError."""
    contents = [read_artifact(path, kind) for path in paths]
    names = [backend_of(content) or file_name(path) for path, content in zip(paths, contents, strict=True)]
    return [Named(name, content) for name, content in zip(names, contents, strict=True)]


def read_distinct(paths: Sequence[Path], kind: type[Kind]) -> list[Named[Kind]]:
    """Read files with distinct names: two of the same name go by their paths."""
    found = read_named(paths, kind)
    names = [each.name for each in found]
    return [
        each if names.count(each.name) == 1 else Named(str(path), each.content)
        for path, each in zip(paths, found, strict=True)
    ]


def file_name(path: Path) -> str:
    """The subject by the file name: jax_gate.json is JAX, smollm/gate.json is smollm."""
    parts = [part for part in re.split(r"[_.\- ]+", path.stem) if part and part.lower() not in _KINDS]
    if not parts:
        return path.parent.name or path.stem
    return _BACKENDS.get(parts[0].lower(), parts[0]) if len(parts) == 1 else " ".join(parts)


def backend_name(config: Mapping[str, Any]) -> str | None:
    """The backend in a server's configuration; None where it is unknown."""
    return _BACKENDS.get(str(server_fact(config, "backend")))


def subject(model: str | None, name: str, several: bool) -> str:
    """The subject of a table; with the name where there are several."""
    return ", ".join(filter(None, (model, name if several else None)))
