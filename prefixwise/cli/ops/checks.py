"""What the verbs of `ops` refuse before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from prefixwise.cli.engine_options import DtypeName
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.validate.options import split_server_flags


def checked_root(root: str) -> str:
    """The folder of runs; an empty one would be the root of the disk. Raises CommandError."""
    if not root.strip():
        raise CommandError("--artifact-root must be a folder, got nothing", status=MISUSED)
    return root


def checked_dtype(dtype: str) -> str:
    """Of all servers of a run: each would fail. Raises CommandError."""
    if dtype not in get_args(DtypeName):
        raise CommandError(f"--dtype must be one of {', '.join(get_args(DtypeName))}, got {dtype!r}", status=MISUSED)
    return dtype


def checked_server_flags(flags: Sequence[str] | None) -> tuple[str, ...]:
    """Their words. Raises CommandError for a key, which would lie in artifacts and in lists of processes."""
    words = split_server_flags(flags)
    if any(word == "--api-key" or word.startswith("--api-key=") for word in words):
        message = "--api-key cannot be a flag of the servers: those that ops starts are for itself, and have no key"
        raise CommandError(message, status=MISUSED)
    return words
