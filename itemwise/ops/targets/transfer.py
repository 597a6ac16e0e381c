"""What was fetched, moved to where it belongs: whole files only."""

from __future__ import annotations

import shutil
from pathlib import Path

from itemwise.ops.targets.base import TargetError


def put_in_place(fetched: Path, destination: Path) -> None:
    """The one thing in the folder becomes `destination`; a folder is laid over one there is. Raises TargetError."""
    found = list(fetched.iterdir())
    if len(found) != 1:
        raise TargetError(f"expected one file or folder to be fetched, got {len(found)}")
    try:
        if found[0].is_dir():
            shutil.copytree(found[0], destination, dirs_exist_ok=True)
        else:
            found[0].replace(destination)
    except (OSError, shutil.Error) as error:
        raise TargetError(f"{destination} cannot be written: {error}") from None
