"""Connections to a Ray cluster: to one that runs, or to a new one on this machine that ends with this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefixwise.contract.errors import BackendError

LOCAL = "local"
AUTO = "auto"
CONNECT_SECONDS = 10.0
# Of Serve's proxies. A Serve that this package has not started has it if all nodes have it.
PROXY_ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "prefixwise.cluster.proxy.middlewares"}


def check_reachable(address: str) -> None:
    """Raises ConnectionError where nothing listens at the address; Ray itself would retry for minutes. Ray resolves
    names such as `auto`, so they pass."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from None


@contextmanager
def connected(address: str) -> Iterator[bool]:
    """Connect for the block; yields whether the cluster is new: for `local`, and for `auto` where none runs here.

    Actors that are started meanwhile, Serve's proxies among them, have PROXY_ENVIRONMENT. Raises BackendError.
    """
    import ray

    is_new = address == LOCAL or not _joins(address)
    if is_new:
        ray.init(address=LOCAL, runtime_env=_environment())
    try:
        yield is_new
    finally:
        ray.shutdown()


def _environment() -> dict[str, Any]:
    return {"env_vars": dict(PROXY_ENVIRONMENT)}


def _joins(address: str) -> bool:
    """Whether a cluster answered at the address; for `auto` none need run."""
    import ray

    try:
        check_reachable(address)
        ray.init(address=address, runtime_env=_environment())
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address != AUTO or not isinstance(error, ConnectionError):
            raise BackendError(f"no Ray cluster answers at {address}: {error}") from None
        return False
    return True
