"""The memory that bodies may take, of all requests together: what clients send, and what they have not read yet.

A request takes bytes as its body arrives and, before it is scored, as many as its response may have. It gives all of
them back when it is over. The first 64 KiB of a request are free, so that small requests are served while large ones
fill the memory. On the event loop.
"""

from __future__ import annotations

from prefixwise.contract.errors import UnavailableError
from prefixwise.server.usage import BODY_BYTES, Usage

FREE_BYTES = 64 * 2**10  # of each request; the number of connections bounds their sum
_RETRY_SECONDS = 1  # what is read and sent at a common speed is gone by then


class BodyMemory:
    """One budget for the server, of one process or many."""

    def __init__(self, max_bytes: int, usage: Usage | None = None) -> None:
        self._max_bytes = max_bytes
        self._usage = usage or Usage()

    @property
    def taken(self) -> int:
        """Bytes that this process has taken, beyond what is free."""
        return self._usage.own(BODY_BYTES)

    def share(self) -> BodyShare:
        """The part of one request, which is empty."""
        return BodyShare(self)

    def check(self, size: int) -> None:
        """Raises UnavailableError if so many bytes are not there."""
        left = self._max_bytes - self._usage.total(BODY_BYTES)
        if size > left:
            raise self._full(left, size)

    def take(self, size: int) -> None:
        """Raises UnavailableError, and takes nothing then. Taken first and checked after, so that two processes never
        take the same bytes."""
        self._usage.add(BODY_BYTES, size)
        left = self._max_bytes - self._usage.total(BODY_BYTES)
        if left < 0:
            self._usage.add(BODY_BYTES, -size)
            raise self._full(left + size, size)

    def give_back(self, size: int) -> None:
        self._usage.add(BODY_BYTES, -size)

    def _full(self, left: int, size: int) -> UnavailableError:
        message = (
            f"requests and responses may take {self._max_bytes} bytes of memory together (--max-body-memory), of "
            f"which {max(left, 0)} are left, and this request needs {size}; try again soon"
        )
        return UnavailableError(message, code="body_memory_full", retry_after=_RETRY_SECONDS)


class BodyShare:
    """The bytes that one request holds."""

    __slots__ = ("_memory", "bytes")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.bytes = 0

    def check(self, more: int) -> None:
        """Raises UnavailableError if so many bytes cannot be taken now. Takes nothing."""
        self._memory.check(self._counted(more))

    def take(self, more: int) -> None:
        """Take so many bytes. Raises UnavailableError, and takes nothing then."""
        counted = self._counted(more)
        if counted:
            self._memory.take(counted)
        self.bytes += more

    def give_back(self) -> None:
        """The request is over."""
        counted = max(0, self.bytes - FREE_BYTES)
        if counted:
            self._memory.give_back(counted)
        self.bytes = 0

    def _counted(self, more: int) -> int:
        return max(0, self.bytes + more - FREE_BYTES) - max(0, self.bytes - FREE_BYTES)
