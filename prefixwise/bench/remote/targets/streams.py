"""Files through the stdin and the stdout of a command: their names are words of a line that we quote.

scp is not used for that: before OpenSSH 9.0 it gives names to the shell at the other end, which reads them again.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from prefixwise.bench.remote.targets.base import Done, TargetError
from prefixwise.bench.remote.targets.transfer import put_in_place

_KEPT_BYTES = 20_000  # of what it complained of
_GRACE_SECONDS = 5.0


def send(command: Sequence[str], source: Path) -> Done:
    """The file is its stdin. Raises TargetError where it cannot be read."""
    try:
        file = source.open("rb")
    except OSError as error:
        raise TargetError(f"{source} cannot be read: {error.strerror}") from None
    with file:
        return _run(command, file, _drain)


def unpack(command: Sequence[str], folder: Path) -> Done:
    """Its stdout is a tar archive, unpacked into the folder. Raises TargetError where that fails on this side."""
    if not hasattr(tarfile, "data_filter"):
        raise TargetError("expected a Python here that can unpack an archive safely, which is 3.11.4 or later")
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
    # One that failed has a reason of its own for an archive that is none.
    if done.status == 0 and broken:
        raise TargetError(f"expected a tar archive that can be unpacked, got: {broken[0]}")
    return done


@contextmanager
def landing(destination: Path) -> Iterator[Path]:
    """A folder beside it for what is fetched; the one thing in it becomes `destination`. Raises TargetError."""
    parent = destination.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=parent, prefix=".download-")
    except OSError as error:
        raise TargetError(f"{destination} cannot be written: {error.filename}: {error.strerror}") from None
    with made as folder:
        yield Path(folder)
        put_in_place(Path(folder), destination)


def _run(command: Sequence[str], stdin: IO[bytes] | int, take: Callable[[IO[bytes]], None]) -> Done:
    """To its end; what it complains of goes to a file, as nobody hears it while it runs."""
    with tempfile.TemporaryFile() as complaints:
        try:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True
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
        complaints.seek(0)
        return Done(status, "", complaints.read()[-_KEPT_BYTES:].decode("utf-8", "replace"))


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
