"""The rate that a paced link passes on this machine under its load."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from benchmarks.gpu.processes import Processes

LINK = "benchmarks.gpu.paced_link"
SETTLE_S, COUNTED_S = 0.3, 1.0
BUFFER_BYTES = 1 << 18
TIMEOUT_S = 30.0


def passed_mbps(rates_mbps: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yield each rate, and the Mbps that one direction passed in a second; 0: not paced."""
    with socket.create_server(("127.0.0.1", 0)) as server, Processes() as processes:
        host, port = server.getsockname()
        processes.start("link", LINK, [f"{host}:{port}"])
        place = host, processes.receive("link", TIMEOUT_S)["port"]
        with socket.create_connection(place) as source:
            sink, _ = server.accept()
            with sink:
                counter = _Counter(sink)
                threading.Thread(target=_fill, args=(source,), daemon=True).start()
                threading.Thread(target=counter.run, daemon=True).start()
                for mbps in rates_mbps:
                    processes.send("link", {"mbps": mbps})
                    time.sleep(SETTLE_S)
                    yield mbps, counter.mbps_over(COUNTED_S)


class _Counter:
    """Counts what comes."""

    def __init__(self, sink: socket.socket) -> None:
        self._sink, self._num_bytes = sink, 0

    def run(self) -> None:
        """Read until it ends."""
        buffer = bytearray(BUFFER_BYTES)
        with suppress(OSError):
            while size := self._sink.recv_into(buffer):
                self._num_bytes += size

    def mbps_over(self, seconds: float) -> float:
        """Measure the rate from now over some seconds."""
        before, began_s = self._num_bytes, time.monotonic()
        time.sleep(seconds)
        return (self._num_bytes - before) * 8 / 1e6 / (time.monotonic() - began_s)


def _fill(source: socket.socket) -> None:
    """Send as fast as it goes, until it ends."""
    with suppress(OSError):
        while True:
            source.sendall(bytes(BUFFER_BYTES))
