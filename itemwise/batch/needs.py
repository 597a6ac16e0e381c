"""Packages that not everyone has: their absence is one line that says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from itemwise.contract.errors import BatchError

_EXTRAS = {"pyarrow": "batch", "fsspec": "batch", "ray": "cluster"}


@contextmanager
def needed(package: str) -> Iterator[None]:
    """For the block that imports it. Raises BatchError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        extra = _EXTRAS[package]
        raise BatchError(f'{package} is not installed; install it with: pip install "itemwise[{extra}]"') from None
