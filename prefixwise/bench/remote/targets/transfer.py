"""What was fetched, moved to where it belongs: whole files and whole folders only."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from prefixwise.bench.remote.targets.base import TargetError


def put_in_place(fetched: Path, destination: Path) -> None:
    """The one thing in the folder becomes `destination`, whatever was there. Raises TargetError."""
    found = list(fetched.iterdir())
    if len(found) != 1:
        raise TargetError(f"expected one file or folder to be fetched, got {len(found)}")
    replace_whole(found[0], destination)


def replace_whole(new: Path, destination: Path) -> None:
    """By renaming, so on the same disk: there is the old one or the new one, and no mixture. Raises TargetError."""
    try:
        if not (new.is_dir() and destination.is_dir()):
            new.replace(destination)
            return
        with tempfile.TemporaryDirectory(dir=destination.absolute().parent, prefix=".replaced-") as aside:
            old = Path(aside) / "old"
            destination.rename(old)
            try:
                new.rename(destination)
            except BaseException:
                old.rename(destination)
                raise
    except (OSError, shutil.Error) as error:
        raise TargetError(f"{destination} cannot be written: {error}") from None


def copy_whole(source: Path, destination: Path) -> None:
    """Beside the place first: half a copy must not be taken for one. Raises TargetError."""
    parent = destination.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".copy-") as folder:
            copied = Path(folder) / destination.name
            if source.is_dir():
                shutil.copytree(source, copied, ignore_dangling_symlinks=True)
            else:
                shutil.copyfile(source, copied)
            replace_whole(copied, destination)
    except (OSError, shutil.Error) as error:
        raise TargetError(f"{source} cannot be copied to {destination}: {error}") from None
