"""The server's life: starting, ready, draining, stopped; and which requests are in flight.

Everything here happens on the event loop. `launch.py` moves from phase to phase, the gate asks which one it is.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from prefixwise.contract.errors import UnavailableError
from prefixwise.server.call import Call

_ABORT_SECONDS = 5.0  # for answering those that the grace period has cut off


class Phase(StrEnum):
    """Where in its life the server is."""

    STARTING = "starting"  # the model is loading or warming up
    READY = "ready"
    DRAINING = "draining"  # told to stop; what is in flight goes on
    STOPPED = "stopped"


class Lifecycle:
    """One server's phase and the requests that it has not answered yet."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._in_flight: dict[Call, asyncio.Task[object]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_stopping(self) -> bool:
        return self.phase in (Phase.DRAINING, Phase.STOPPED)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def check_ready(self) -> None:
        """Raises UnavailableError unless work is taken."""
        if self.phase is Phase.READY:
            return
        if self.phase is Phase.STARTING:
            message = "the model is still loading or warming up, so nothing can be scored yet; try again soon"
            raise UnavailableError(message, code="not_ready")
        raise shutting_down()

    def enter(self, call: Call) -> None:
        """A request has arrived, in the task that is running."""
        task = asyncio.current_task()
        assert task is not None, "a request is answered in a task"
        self._in_flight[call] = task
        self._idle.clear()

    def leave(self, call: Call) -> None:
        """It has been answered, or its client has gone."""
        del self._in_flight[call]
        if not self._in_flight:
            self._idle.set()

    def become_ready(self) -> None:
        """The engine is warm. Too late where the server was told to stop in the meantime."""
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    async def drain(self, grace_seconds: float) -> None:
        """Take no more work, let what is in flight finish, and cut off what has not after `grace_seconds`."""
        self.phase = Phase.DRAINING
        if not await self._becomes_idle(grace_seconds):
            for call, task in list(self._in_flight.items()):
                call.is_aborted = True
                task.cancel()
            await self._becomes_idle(_ABORT_SECONDS)
        self.phase = Phase.STOPPED

    async def _becomes_idle(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True


def shutting_down() -> UnavailableError:
    """What a request gets that comes too late, or takes too long, for a server that is stopping."""
    message = "the server is shutting down; send the request to another one, or again later"
    return UnavailableError(message, code="shutting_down")
