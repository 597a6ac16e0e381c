"""Files to and from a target: through the stdin and stdout of a command, and into place as whole files and folders.

scp is not used over ssh: before OpenSSH 9.0 it gives file names to the remote shell, which parses them again.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from prefixwise.bench.remote.targets.base import CommandResult, TargetError

_MAX_STDERR_BYTES = 20_000
_GRACE_SECONDS = 5.0


def send(command: Sequence[str], source: Path) -> CommandResult:
    """Run the command with the file as its stdin. Raises TargetError if the file cannot be read."""
    try:
        file = source.open("rb")
    except OSError as error:
        raise TargetError(f"{source} cannot be read: {error.strerror}") from None
    with file:
        return _run(command, file, _drain)


def unpack(command: Sequence[str], folder: Path) -> CommandResult:
    """Run the command and unpack its stdout, a tar archive, into the folder. Raises TargetError if unpacking fails."""
    if not hasattr(tarfile, "data_filter"):
        raise TargetError("expected Python 3.11.4 or later here, which can unpack an archive safely")
    broken: list[tarfile.TarError] = []

    def take(output: IO[bytes]) -> None:
        try:
            with tarfile.open(fileobj=output, mode="r|") as archive:
                archive.extractall(folder, filter="data")
        except tarfile.TarError as error:
            broken.append(error)
        except OSError as error:
            raise TargetError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
        _drain(output)

    done = _run(command, subprocess.DEVNULL, take)
    # A failed command has its own reason for an invalid archive.
    if done.status == 0 and broken:
        raise TargetError(f"expected a tar archive that can be unpacked, got: {broken[0]}")
    return done


@contextmanager
def landing(destination: Path) -> Iterator[Path]:
    """A temporary folder for the download; its only entry becomes `destination`. Raises TargetError."""
    parent = destination.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=parent, prefix=".download-")
    except OSError as error:
        raise TargetError(f"{destination} cannot be written: {error.filename}: {error.strerror}") from None
    with made as folder:
        yield Path(folder)
        put_in_place(Path(folder), destination)


def _run(command: Sequence[str], stdin: IO[bytes] | int, take: Callable[[IO[bytes]], None]) -> CommandResult:
    """Run to the end, with stderr in a temporary file."""
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        except OSError as error:
            raise TargetError(f"{command[0]} cannot be run: {error.strerror}") from None
        assert process.stdout is not None
        with process.stdout:
            try:
                take(process.stdout)
                status = process.wait()
            except BaseException:
                _end(process)
                raise
        stderr.seek(0)
        return CommandResult(status, "", stderr.read()[-_MAX_STDERR_BYTES:].decode("utf-8", "replace"))


def _drain(output: IO[bytes]) -> None:
    while output.read(1 << 16):
        pass


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def put_in_place(fetched: Path, destination: Path) -> None:
    """Move the only entry of the folder to `destination`, replacing it. Raises TargetError."""
    found = list(fetched.iterdir())
    if len(found) != 1:
        raise TargetError(f"expected one file or folder to be fetched, got {len(found)}")
    replace_whole(found[0], destination)


def replace_whole(new: Path, destination: Path) -> None:
    """Replace by renaming on the same disk, so there is never a mixture of old and new. Raises TargetError."""
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
    """Copy to a temporary place first: a partial copy must not be mistaken for a complete one. Raises TargetError."""
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
