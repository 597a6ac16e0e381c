"""A cable with delay and loss, where the kernel has no `netem`: frames between two interfaces, through this process.

    python -m tests.hosts.relay HOST_SIDE NETWORK_SIDE DELAY LOSS
    python -m tests.hosts.relay INTERFACE                            # on each host first: frames as on a cable

As `tc qdisc add dev eth0 root netem delay .. loss ..` on the host: only the frames that it sends are delayed and lost.
Prints `ready` when frames go through.
"""

from __future__ import annotations

import ctypes
import fcntl
import random
import selectors
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_ETH_P_ALL = 0x0003
_SOL_PACKET, _PACKET_IGNORE_OUTGOING = 263, 23
_SIOCETHTOOL = 0x8946
_OFFLOADS = {"tx checksum": 0x17, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}
_FRAME = 1 << 17
SEED = 30


class Relay:
    """Frames wait in the order in which they came, as all are delayed alike."""

    def __init__(self, host_side: str, network_side: str, delay: float, loss: float) -> None:
        self._host, self._network = _open(host_side), _open(network_side)
        self._delay, self._loss = delay, loss
        self._random = random.Random(SEED)
        self._waiting: deque[tuple[float, bytes]] = deque()

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for side in (self._host, self._network):
            selector.register(side, selectors.EVENT_READ)
        while True:
            wait = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            ready = {key.fileobj for key, _ in selector.select(wait)}
            if self._host in ready:
                self._receive()
            if self._network in ready:
                _send(self._host, self._network.recv(_FRAME))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _send(self._network, self._waiting.popleft()[1])

    def _receive(self) -> None:
        frame = self._host.recv(_FRAME)
        if self._random.random() >= self._loss:
            self._waiting.append((time.monotonic() + self._delay, frame))


def _open(interface: str) -> socket.socket:
    """All frames that come in at the interface."""
    side = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    side.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    side.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    side.bind((interface, _ETH_P_ALL))
    return side


def _send(side: socket.socket, frame: bytes) -> None:
    with suppress(OSError):  # the host is gone, or its queue is full: the frame is lost, as it would be on a cable
        side.send(frame)


def switch_offloads_off(interface: str) -> None:
    """From then on its frames have the sizes and the checksums that a cable would carry."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for number in _OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", number, 0))
            fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP", interface.encode(), ctypes.addressof(value)))


def main(interface: str, *others: str) -> None:
    if not others:
        switch_offloads_off(interface)
        return
    network_side, delay, loss = others
    relay = Relay(interface, network_side, float(delay), float(loss))
    print("ready", flush=True)
    relay.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
