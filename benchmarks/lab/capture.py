"""A capture of a network device's traffic, byte by byte. Needs root and Linux."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from selectors import EVENT_READ, DefaultSelector
from threading import Thread

from benchmarks.lab.host import Host

ALL_PROTOCOLS = 0x0003
"""ETH_P_ALL: frames that come, and those that leave."""
BUFFER_BYTES = 64 << 20
SO_RCVBUFFORCE = 33
SOL_PACKET, PACKET_STATISTICS = 263, 6
MAX_FRAME_BYTES = 14 + 65_536
"""Ethernet's header and the largest segment, which is not cut yet."""


class Capture:
    """A device's traffic; it is complete once the `with` of `capture` is over.

    Attributes:
        frames: headers and all, both ways, in their order.
        num_missed: frames that came faster than they could be taken.
    """

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.num_missed = 0

    def saw(self, marker: bytes) -> bool:
        """Whether these bytes lie in a frame; two segments may have parted them."""
        return any(marker in frame for frame in self.frames)

    def take(self, device: socket.socket, end: socket.socket) -> None:
        """Take frames until `end` is readable, with those that came before."""
        with DefaultSelector() as selector:
            selector.register(device, EVENT_READ)
            selector.register(end, EVENT_READ)
            ended = False
            while not ended:
                ended = any(key.fileobj is end for key, _ in selector.select())
                with suppress(BlockingIOError):
                    while True:
                        self.frames.append(device.recv(MAX_FRAME_BYTES))
        statistics = device.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self.num_missed = int.from_bytes(statistics[4:], "little")


@contextmanager
def capture(host: Host, name: str) -> Iterator[Capture]:
    """Take what crosses the device of that name, from now to the end of this."""
    captured = Capture()
    ours, end = socket.socketpair()
    with ours, end, host.call(_open, name) as device:
        thread = Thread(target=captured.take, args=(device, end))
        thread.start()
        try:
            yield captured
        finally:
            ours.close()
            thread.join()


def _open(name: str) -> socket.socket:
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    device.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    device.setblocking(False)
    device.bind((name, ALL_PROTOCOLS))
    return device
