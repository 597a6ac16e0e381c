"""What the processes of one server use together: memory of bodies, connections, requests in flight. And how often the
supervisor has started one of them again.

Every process counts in a row of its own in shared memory and reads all rows, so no lock can outlive a process that is
killed. The limits on them are the server's, however many processes it has.
"""

from __future__ import annotations

import mmap

import numpy as np

BODY_BYTES, CONNECTIONS, IN_FLIGHT, ENGINE_RESTARTS, WORKER_RESTARTS = range(5)
_FIRST_ADDRESS = 5
_NUM_ADDRESSES = 1 << 16  # addresses share a counter where their hashes agree; the hash is keyed by the process
_NUM_FIELDS = _FIRST_ADDRESS + _NUM_ADDRESSES


class SharedUsage:
    """One row of counters for each process. Made before the processes are, which inherit it."""

    def __init__(self, num_processes: int = 1) -> None:
        self._memory = mmap.mmap(-1, 8 * num_processes * _NUM_FIELDS)
        self._rows = np.frombuffer(self._memory, np.int64).reshape(num_processes, _NUM_FIELDS)

    def of(self, process: int) -> Usage:
        """For this process to count in."""
        return Usage(self, process)

    def total(self, field: int) -> int:
        """Of all processes."""
        return int(self._rows[:, field].sum())

    def clear(self, process: int) -> None:
        """The process has ended."""
        self._rows[process] = 0


class Usage:
    """The counters of one process, and the totals of all."""

    def __init__(self, shared: SharedUsage | None = None, process: int = 0) -> None:
        self._shared = shared or SharedUsage()
        self._row = self._shared._rows[process]

    def add(self, field: int, number: int) -> None:
        """Only this process writes to its row, on one thread."""
        self._row[field] += number

    def own(self, field: int) -> int:
        """Of this process."""
        return int(self._row[field])

    def total(self, field: int) -> int:
        """Of all processes."""
        return self._shared.total(field)

    def of_others(self, field: int) -> int:
        return self.total(field) - self.own(field)


def address_field(address: bytes) -> int:
    """The counter of connections of this address."""
    return _FIRST_ADDRESS + hash(address) % _NUM_ADDRESSES
