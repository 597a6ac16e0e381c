"""Where clients and processes meet: the listening sockets of the workers, and the folder of the Unix sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from pathlib import Path

from prefixwise.contract.errors import BackendError
from prefixwise.server.config import ServerOptions
from prefixwise.server.launch import bind

_MAX_FOLDER_BYTES = 80  # of the folder, as paths of sockets have at most 103 bytes on macOS, 107 on Linux


def make_socket_folder() -> Path:
    """A folder of mode 0700. Raises BackendError where none can be made, or a socket's path in it would be too long."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="prefixwise-"))
    except OSError as error:
        message = f"cannot make a folder for the sockets of the HTTP workers: {error.strerror}; TMPDIR must be a folder"
        raise BackendError(f"{message} that this user can write to") from None
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        folder.rmdir()
        most = _MAX_FOLDER_BYTES - len(folder.name) - 1
        message = (
            f"TMPDIR must be a path of at most {most} bytes, as that of a Unix socket is short, got {folder.parent}"
        )
        raise BackendError(message)
    return folder


def keep_socket_folder(folder: Path) -> None:
    """Let its files look new, as programs that clean TMPDIR remove old ones. Raises BackendError if it is gone."""
    with contextlib.suppress(OSError):  # a file that a worker replaces: those behind it have the next time
        for path in (folder, *folder.iterdir()):
            os.utime(path)
    if not os.access(folder, os.X_OK):
        message = f"somebody has removed {folder}, where the processes of this server meet"
        raise BackendError(f"{message}; start the server again, with a TMPDIR that nobody cleans")


def bind_workers(options: ServerOptions, number: int) -> list[socket.socket]:
    """A listening socket for each worker, on one port. The kernel spreads connections over them, by their addresses.

    Elsewhere than on Linux, the workers share one socket.
    """
    if sys.platform != "linux":
        return [bind(options)] * number
    only = bind(options)  # fails if any other server has the port; sockets that share it would not
    port = only.getsockname()[1]
    only.close()
    return [bind(options, port=port, shares_port=True) for _ in range(number)]
