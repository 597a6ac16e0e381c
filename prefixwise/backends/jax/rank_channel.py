"""Messages between the ranks of a model on several hosts: rank 0 says what all of them compute next.

A message is JSON and any number of arrays, over TCP. Rank 0 listens on the port behind jax's coordinator. The others
connect before they load anything, so that a rank that fails says so. Both sides send a heartbeat; a side that hears
nothing for LOST_SECONDS, or whose connection ends, takes the other for lost.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import BackendError

log = logging.getLogger("prefixwise")

CONNECT_SECONDS = 300.0  # for all ranks to start; as jax waits for its processes
HEARTBEAT_SECONDS = 2.0
LOST_SECONDS = 60.0  # a host may be busy with a compiler, and a cable may be out for a moment
_LENGTHS = struct.Struct("<QQ")  # bytes of the JSON, bytes of the arrays
_MAX_JSON_BYTES = 1 << 26
_HEARTBEAT, _FAILED = "heartbeat", "failed"
_GREETING_SECONDS = 10.0

Arrays = Mapping[str, NDArray[Any]]


class RankLostError(BackendError):
    """A rank has ended, or cannot be reached."""


@dataclass(frozen=True)
class Message:
    """What to do, its values, and its arrays."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)

    def encode(self) -> bytes:
        described = [[name, array.dtype.str, list(array.shape)] for name, array in self.arrays.items()]
        text = json.dumps({"kind": self.kind, "values": self.values, "arrays": described}).encode()
        data = [np.ascontiguousarray(array).tobytes() for array in self.arrays.values()]
        return b"".join((_LENGTHS.pack(len(text), sum(map(len, data))), text, *data))

    @classmethod
    def decode(cls, text: bytes, data: bytes) -> Message:
        """Raises ValueError, KeyError or TypeError for what `encode` did not make."""
        found = json.loads(text)
        arrays: dict[str, NDArray[Any]] = {}
        at = 0
        for name, dtype, shape in found["arrays"]:
            array = np.frombuffer(data, np.dtype(dtype), count=int(np.prod(shape)), offset=at).reshape(shape)
            arrays[name] = array
            at += array.nbytes
        return cls(str(found["kind"]), dict(found["values"]), arrays)


class Connection:
    """To one other rank. Any thread may send; messages that came wait in `inbox`, and `None` there is the end."""

    def __init__(self, peer: socket.socket, title: str, on_lost: Callable[[str], None] | None = None) -> None:
        self.title = title  # "rank 1 (10.0.0.2)"
        self.inbox: SimpleQueue[Message | None] = SimpleQueue()
        self.lost: str | None = None  # the reason
        self._peer = peer
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        peer.settimeout(LOST_SECONDS)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for work in (self._receive_all, self._beat):
            threading.Thread(target=work, name=f"prefixwise-{title}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Raises RankLostError."""
        self.send_bytes(message.encode())

    def send_bytes(self, data: bytes) -> None:
        """A message that is encoded already. Raises RankLostError."""
        try:
            with self._lock:
                self._peer.sendall(data)
        except OSError as error:
            self._lose(error.strerror or str(error))
            raise RankLostError(self.lost or "closed") from None

    def receive(self) -> Message:
        """The next message. Raises RankLostError."""
        found = self.inbox.get()
        if found is None:
            self.inbox.put(None)
            raise RankLostError(self.lost or f"{self.title} has closed its connection")
        return found

    def fail(self, reason: str) -> None:
        """Close it, and tell the other side why."""
        with suppress(RankLostError):
            self.send(Message(_FAILED, {"reason": reason}))
        self.close()

    def close(self) -> None:
        self._is_closed.set()
        with suppress(OSError):  # the other side was faster
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()

    def _receive_all(self) -> None:
        try:
            while True:
                message = receive_message(self._peer)
                if message.kind == _FAILED:
                    raise ValueError(message.values["reason"])
                if message.kind != _HEARTBEAT:
                    self.inbox.put(message)
        except TimeoutError:
            self._lose(f"nothing was heard of it for {LOST_SECONDS:g} s")
        except (OSError, ValueError, LookupError, TypeError) as error:
            self._lose(getattr(error, "strerror", None) or str(error))

    def _beat(self) -> None:
        while not self._is_closed.wait(HEARTBEAT_SECONDS):
            try:
                self.send(Message(_HEARTBEAT))
            except RankLostError:
                return

    def _lose(self, reason: str) -> None:
        """The first reason stays. One that was closed here is not lost."""
        is_first = not self._is_closed.is_set()
        self._is_closed.set()
        if is_first:
            self.lost = f"{self.title} has ended, or cannot be reached: {reason}"
            self._peer.close()
            if self._on_lost is not None:
                self._on_lost(self.lost)
        self.inbox.put(None)


def receive_message(peer: socket.socket) -> Message:
    """Raises OSError, and ValueError for bytes that are no message."""
    text_bytes, data_bytes = _LENGTHS.unpack(_exactly(peer, _LENGTHS.size))
    if text_bytes > _MAX_JSON_BYTES:
        raise ValueError("it sent something that is no message of a rank")
    return Message.decode(_exactly(peer, text_bytes), _exactly(peer, data_bytes))


def _exactly(peer: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = peer.recv(min(size - len(found), 1 << 20))
        if not part:
            raise ConnectionError("the connection was closed")
        found += part
    return bytes(found)


def parse_address(address: str) -> tuple[str, int]:
    """`host:port`. Raises BackendError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65535):
        raise BackendError(f"dist_init_addr must be like 10.0.0.1:5000, the address of rank 0, got {address!r}")
    return host.strip("[]"), int(port) + 1


def accept_ranks(address: str, num_ranks: int, on_lost: Callable[[str], None]) -> list[Connection]:
    """On rank 0: wait for all others. Raises BackendError."""
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found: dict[int, Connection] = {}
    end = time.monotonic() + CONNECT_SECONDS
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise BackendError(f"rank 0 cannot listen on {host} port {port}: {error.strerror}") from None
        listener.listen(num_ranks)
        while len(found) < num_ranks - 1:
            listener.settimeout(max(0.1, end - time.monotonic()))
            try:
                peer, (their_host, *_) = listener.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, num_ranks) if rank not in found)
                message = f"rank {missing} did not connect to {host} port {port} within {CONNECT_SECONDS:g} s"
                raise BackendError(message) from None
            rank = _greeting_rank(peer, their_host, num_ranks)
            if rank is not None:
                found[rank] = Connection(peer, f"rank {rank} ({their_host})", on_lost)
    return [found[rank] for rank in sorted(found)]


def _greeting_rank(peer: socket.socket, host: str, num_ranks: int) -> int | None:
    """The rank at the other end; None for a stranger, whose connection is closed."""
    peer.settimeout(_GREETING_SECONDS)
    try:
        rank = int(receive_message(peer).values["rank"])
        if not 0 < rank < num_ranks:
            raise ValueError(f"it says that it has rank {rank}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.warning("a connection from %s was refused: it is no rank of this model: %s", host, error)
        peer.close()
        return None
    return rank


def connect_to_leader(address: str, rank: int) -> Connection:
    """On the other ranks, as soon as rank 0 listens. Raises BackendError."""
    host, port = parse_address(address)
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            peer = socket.create_connection((host, port), HEARTBEAT_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > end:
                reason = error.strerror or str(error)
                raise BackendError(f"rank 0 does not answer on {host} port {port}: {reason}") from None
            time.sleep(0.2)
    connection = Connection(peer, f"rank 0 ({host})")
    connection.send(Message("hello", {"rank": rank}))
    return connection


def send_all(connections: Sequence[Connection], message: Message) -> None:
    """Raises RankLostError."""
    data = message.encode()
    for connection in connections:
        connection.send_bytes(data)
