"""The channel between the supervisor and one child: lines of JSON on a socket pair. Its end is the end of the other."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import msgspec

from prefixwise.server.workers.messages import Fault

_READ_BYTES = 1 << 16


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """From the engine process: it takes requests."""

    configuration: dict[str, object]
    watchdog_timeout: float  # of the engine's options


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a worker: it can serve with the engine of this generation."""

    generation: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From a child that cannot load what it needs, before it exits."""

    fault: Fault


class EngineUp(msgspec.Struct, frozen=True, tag=True):
    """To a worker: the engine process takes requests at this ZeroMQ endpoint."""

    generation: int
    endpoint: str


class EngineDown(msgspec.Struct, frozen=True, tag=True):
    """To a worker: the engine process has ended."""

    reason: str
    is_last: bool  # it is not started again


class WorkerDown(msgspec.Struct, frozen=True, tag=True):
    """To the engine process: nobody waits for the requests of this worker any more."""

    identity: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To a child: finish what was started. The engine process then exits."""


class Drained(msgspec.Struct, frozen=True, tag=True):
    """From a worker: it has answered what it had. It goes on refusing new requests until all workers are so far."""


class Exit(msgspec.Struct, frozen=True, tag=True):
    """To a worker: all workers are drained."""


Message = Loaded | Ready | Failed | EngineUp | EngineDown | WorkerDown | Stop | Drained | Exit


class Channel:
    """One end of the channel."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._partial = b""
        self._encoder = msgspec.json.Encoder(enc_hook=str)  # a configuration may have paths
        self._decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Both ends."""
        one, other = socket.socketpair()
        return Channel(one), Channel(other)

    def send(self, message: Message) -> None:
        """Does nothing if the other end is closed. Where it has not read for so long that the socket is full, the
        channel is closed: a message that is lost, or sent in part, would leave both ends with different views."""
        try:
            self.socket.sendall(self._encoder.encode(message) + b"\n")
        except OSError:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Message] | None:
        """The messages of one read, which waits where the socket does. None: the other end is closed."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines]

    def messages(self) -> Iterator[Message]:
        """All messages until the other end is closed, on a socket that waits."""
        while (found := self.receive()) is not None:
            yield from found

    def close(self) -> None:
        self.socket.close()
