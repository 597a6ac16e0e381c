"""Artifacts that may be given several times, each with the name of what it is of: a backend, or its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from prefixwise.bench.artifacts import AbResult, Artifact, LoadResult
from prefixwise.bench.files import read_artifact
from prefixwise.bench.hardware import server_fact

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
    """By backend where the content tells it, else by the file's name. Raises ArtifactError."""
    contents = [read_artifact(path, kind) for path in paths]
    names = [backend_of(content) or file_name(path) for path, content in zip(paths, contents, strict=True)]
    return [Named(name, content) for name, content in zip(names, contents, strict=True)]


def read_distinct(paths: Sequence[Path], kind: type[Kind]) -> list[Named[Kind]]:
    """As above, but two of one name go by their paths, so that neither stands for the other."""
    found = read_named(paths, kind)
    names = [each.name for each in found]
    return [
        each if names.count(each.name) == 1 else Named(str(path), each.content)
        for path, each in zip(paths, found, strict=True)
    ]


def file_name(path: Path) -> str:
    """jax_gate.json is of JAX, smollm/gate.json of smollm."""
    words = [word for word in re.split(r"[_.\- ]+", path.stem) if word and word.lower() not in _KINDS]
    if not words:
        return path.parent.name or path.stem
    return _BACKENDS.get(words[0].lower(), words[0]) if len(words) == 1 else " ".join(words)


def backend_of_load(result: LoadResult) -> str | None:
    """None where the server does not say."""
    return _backend(result.server_config)


def backend_of_variants(result: AbResult) -> str | None:
    """None where they are of several: then it is the backends that are compared."""
    found = {_backend(variant.server_config) for variant in result.variants}
    return found.pop() if len(found) == 1 else None


def _backend(config: Mapping[str, Any]) -> str | None:
    return _BACKENDS.get(str(server_fact(config, "backend")))
