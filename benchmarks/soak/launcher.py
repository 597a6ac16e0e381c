"""`python -m benchmarks.soak.launcher SOCKET ARGUMENTS`: `prefixwise ARGUMENTS` on a device that fails on command.

Commands come over the Unix socket SOCKET, one JSON object per connection: the arguments of `FaultyBackend.inject`, or
`{"clear": true}`; the answer counts the forwards that faults have struck so far. The product knows nothing of it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from functools import partial
from typing import Any
from unittest.mock import patch

from prefixwise.backends.load import load_backend
from prefixwise.cli.main import main
from prefixwise.forward.backend import BackendOptions
from prefixwise.host import end_with_parent
from prefixwise.models.checkpoint import Checkpoint
from tests.faults import FaultyBackend


def command_faults(path: str, command: dict[str, Any]) -> dict[str, int]:
    """Send a command to the server of this socket; returns the forwards that faults have struck, by kind.

    Raises OSError where there is no such server.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(json.dumps(command).encode())
        connection.shutdown(socket.SHUT_WR)
        struck: dict[str, int] = json.loads(connection.makefile("rb").read())
    return struck


def obey(listener: socket.socket, backend: FaultyBackend) -> None:
    """Execute commands until the process ends."""
    while True:
        connection, _ = listener.accept()
        with connection:
            command = json.loads(connection.makefile("rb").read())
            if command.pop("clear", False):
                backend.clear()
            elif command:
                backend.inject(**command)
            connection.sendall(json.dumps(backend.struck).encode())


def load_faulty_backend(path: str, checkpoint: Checkpoint, options: BackendOptions) -> FaultyBackend:
    """The backend that the options ask for, within one that takes commands."""
    backend = FaultyBackend(load_backend(checkpoint, options))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=obey, args=(listener, backend), name="soak-faults", daemon=True).start()
    return backend


if __name__ == "__main__":
    end_with_parent(os.getppid())
    with patch("prefixwise.launch.loading.load_backend", partial(load_faulty_backend, sys.argv[1])):
        main(sys.argv[2:])
