"""Whether anybody listens at a cluster's address, asked before Ray is: Ray itself would try for minutes."""

from __future__ import annotations

import socket

CONNECT_SECONDS = 10.0


def check_reachable(address: str) -> None:
    """Raises ConnectionError. Names such as `auto` are Ray's own to resolve."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from None
