"""Artifacts on disk: written whole or not at all, read with an error that says what is wrong."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prefixwise.contract.errors import ArtifactError
from prefixwise.host import replacing

if TYPE_CHECKING:  # the agent on a target writes text, and is started many times
    from pydantic import ValidationError

    from prefixwise.bench.kinds.base import Artifact

Kind = TypeVar("Kind", bound="Artifact")


def now_utc() -> str:
    """The time in the format of artifacts: 2026-02-11T12:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_text(path: Path, text: str) -> None:
    """Write atomically: a reader sees the old file or the new one. Raises ArtifactError.

    A link stays, and what it points to is replaced; a pipe or a device is written to as it is.
    """
    try:
        if _is_plain(path):
            _replace(Path(os.path.realpath(path)), text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror}") from None


def _is_plain(path: Path) -> bool:
    """True for a file and for a path that does not exist yet; False for a folder or a device."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def _replace(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)


def write_artifact(path: Path, artifact: Artifact) -> None:
    """Write an artifact as indented JSON."""
    content = without_nan(artifact.model_dump(by_alias=True, exclude_none=False))
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def without_nan(value: Any) -> Any:
    """A copy with None for every number that is not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(each) for key, each in value.items()}
    return [without_nan(each) for each in value] if isinstance(value, list | tuple) else value


def read_artifact(path: Path, kind: type[Kind]) -> Kind:
    """Read and validate an artifact. Raises ArtifactError, which names the first invalid fields."""
    return parse_artifact(read_bytes(path), kind, str(path))


def read_bytes(path: Path) -> bytes:
    """Raises ArtifactError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None


def parse_artifact(content: bytes, kind: type[Kind], source: str) -> Kind:
    """Raises ArtifactError."""
    from pydantic import ValidationError

    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ArtifactError(f"{source} is no {kind.__name__}: {'; '.join(problems_of(error)[:5])}") from None


def problems_of(error: ValidationError) -> list[str]:
    """One line per error: the field, the expected value, the actual one."""
    lines = []
    for each in error.errors():
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in each["loc"]).lstrip(".")
        lines.append(f"{where or 'the file'}: {each['msg']}")
    return lines


def sha256_of(path: Path) -> str:
    """The SHA-256 of the file's bytes."""
    return hashlib.sha256(read_bytes(path)).hexdigest()
