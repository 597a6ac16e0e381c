"""What goes wrong with a file, as one line that names it."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from prefixwise.contract.errors import BatchError


@contextmanager
def clear_errors(url: str) -> Iterator[None]:
    """For the block that opens, reads or writes it: a disk's, gzip's and Parquet's failures. Raises BatchError."""
    try:
        yield
    except _failures() as error:
        words = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise BatchError(f"{url}: {words or type(error).__name__}") from None


def _failures() -> tuple[type[Exception], ...]:
    """With Arrow's where it was imported, for else it cannot have failed."""
    pyarrow = sys.modules.get("pyarrow")
    of_arrow = () if pyarrow is None else (pyarrow.ArrowException,)
    return (OSError, EOFError, zlib.error, UnicodeDecodeError, *of_arrow)
