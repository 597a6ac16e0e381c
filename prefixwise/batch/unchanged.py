"""Is a file of the input still what the job was cut from?"""

from __future__ import annotations

from prefixwise.batch.parts import InputFile
from prefixwise.batch.storage import find_file
from prefixwise.contract.errors import BatchError


def check_unchanged(file: InputFile) -> None:
    """By its size and its version. Raises BatchError."""
    now = find_file(file.url)
    if (now.size, now.version) != (file.size, file.version):
        sizes = f"expected {file.size} bytes of version {file.version}, got {now.size} of {now.version}"
        raise BatchError(f"{file.url} has changed since the job began: {sizes}; --overwrite begins anew")
