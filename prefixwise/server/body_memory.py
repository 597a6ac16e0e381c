"""The memory that bodies may take, of all requests together: what clients send, and what they have not read yet.

A request takes bytes as its body arrives and, before it is scored, as many as its response may have. It gives all of
them back when it is over. The first 64 KiB of a request are free, so that small requests are served while large ones
fill the memory. On the event loop.
"""

from __future__ import annotations

from prefixwise.contract.errors import UnavailableError

FREE_BYTES = 64 * 2**10  # of each request; the number of connections bounds their sum
_RETRY_SECONDS = 1  # what is read and sent at a common speed is gone by then


class BodyMemory:
    """One budget for the process."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.taken = 0  # bytes, beyond what is free

    def share(self) -> BodyShare:
        """The part of one request, which is empty."""
        return BodyShare(self)

    def check(self, size: int) -> None:
        """Raises UnavailableError if so many bytes are not there."""
        if size > self._max_bytes - self.taken:
            message = (
                f"requests and responses may take {self._max_bytes} bytes of memory together (--max-body-memory), of "
                f"which {self._max_bytes - self.taken} are left, and this request needs {size}; try again soon"
            )
            raise UnavailableError(message, code="body_memory_full", retry_after=_RETRY_SECONDS)


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
            self._memory.check(counted)
            self._memory.taken += counted
        self.bytes += more

    def give_back(self) -> None:
        """The request is over."""
        self._memory.taken -= max(0, self.bytes - FREE_BYTES)
        self.bytes = 0

    def _counted(self, more: int) -> int:
        return max(0, self.bytes + more - FREE_BYTES) - max(0, self.bytes - FREE_BYTES)
