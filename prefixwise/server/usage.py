"""What the processes of one server use together: memory of bodies, connections, requests in flight. And how often the
supervisor has started one of them again, whether each of them is alive, and whether they serve.

Every process counts in a row of its own in shared memory and reads all rows, so no lock can outlive a process that is
killed. The limits on them are the server's, however many processes it has.
"""

from __future__ import annotations

import mmap
from time import monotonic

import numpy as np

BODY_BYTES, CONNECTIONS, IN_FLIGHT, ENGINE_RESTARTS, WORKER_RESTARTS = range(5)
HEARTBEATS = 5  # grows while the process is alive
SERVING = 6  # the generation of the engine process with which all workers serve; 0: none
_FIRST_ADDRESS = 7
_NUM_ADDRESSES = 1 << 16  # addresses share a counter where their hashes agree; the hash is keyed by the process
_NUM_FIELDS = _FIRST_ADDRESS + _NUM_ADDRESSES

HEARTBEAT_SECONDS = 0.25  # between two heartbeats of a process
SILENT_SECONDS = 10.0  # without a heartbeat: the process does not answer
_LOOK_SECONDS = 1.0  # a look counts no more


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

    def set(self, field: int, number: int) -> None:
        """As `add`."""
        self._row[field] = number

    def own(self, field: int) -> int:
        """Of this process."""
        return int(self._row[field])

    def total(self, field: int) -> int:
        """Of all processes."""
        return self._shared.total(field)

    def of_others(self, field: int) -> int:
        return self.total(field) - self.own(field)


class Elapsed:
    """Time, counted by looks: that in which all processes were stopped together, or slept with their machine, does not
    count."""

    def __init__(self) -> None:
        self._last = monotonic()
        self.seconds = 0.0

    def look(self) -> None:
        """Several times a second."""
        now = monotonic()
        self.seconds += min(now - self._last, _LOOK_SECONDS)
        self._last = now


class Silence:
    """For how long a process has not counted a heartbeat."""

    def __init__(self, process: Usage) -> None:
        self._process = process
        self._heartbeats = process.own(HEARTBEATS)
        self._elapsed = Elapsed()

    def look(self) -> None:
        """Several times a second."""
        self._elapsed.look()
        heartbeats = self._process.own(HEARTBEATS)
        if heartbeats != self._heartbeats:
            self._heartbeats, self._elapsed = heartbeats, Elapsed()

    @property
    def seconds(self) -> float:
        return self._elapsed.seconds

    @property
    def is_long(self) -> bool:
        """The process does not answer."""
        return self.seconds > SILENT_SECONDS

    def is_fatal(self, watchdog_timeout: float) -> bool:
        """The process must be killed; 0: never. However short the timeout of steps is, a process has some time: a busy
        machine may keep it from the CPU."""
        return watchdog_timeout > 0 and self.seconds > max(watchdog_timeout, 2 * SILENT_SECONDS)


def address_field(address: bytes) -> int:
    """The counter of connections of this address."""
    return _FIRST_ADDRESS + hash(address) % _NUM_ADDRESSES
