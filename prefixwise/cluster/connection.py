"""To a Ray cluster that runs, or to a new one on this machine that ends with this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from prefixwise.cluster.addresses import check_reachable
from prefixwise.contract.errors import BackendError

LOCAL = "local"
AUTO = "auto"


@contextmanager
def connected(address: str) -> Iterator[bool]:
    """Whether it is a new one: `local` asks for that, and `auto` where none runs here. Raises BackendError."""
    is_new = address == LOCAL or not _joins(address)
    if is_new:
        ray.init(address=LOCAL)
    try:
        yield is_new
    finally:
        ray.shutdown()


def _joins(address: str) -> bool:
    """Did a cluster answer there? For `auto` none need be."""
    try:
        check_reachable(address)
        ray.init(address=address)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address != AUTO or not isinstance(error, ConnectionError):
            raise BackendError(f"no Ray cluster answers at {address}: {error}") from None
        return False
    return True
