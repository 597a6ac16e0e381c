"""Packages that not everyone has: their absence is one line that says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefixwise.contract.errors import BatchError
from prefixwise.host import install_command

_EXTRAS = {"pyarrow": "batch", "fsspec": "batch", "ray": "cluster"}


@contextmanager
def needed(package: str) -> Iterator[None]:
    """For the block that imports it. Raises BatchError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        command = install_command(_EXTRAS[package])
        raise BatchError(f"{package} is not installed; install it with: {command}") from None
