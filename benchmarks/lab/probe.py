"""The two ends of a measured TCP connection, each a command to be run on a host of a lab.

python -m benchmarks.lab.probe receive ADDRESS SECONDS     # prints its port, then Mbps
python -m benchmarks.lab.probe send ADDRESS PORT           # prints the round trip in ms
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from contextlib import suppress

NUM_PINGS = 15
WARM_UP = 0.5
"""The share of the time that does not count: TCP is still finding out what the link carries."""
CHUNK_BYTES = 1 << 18


def receive(address: str, seconds: float) -> float:
    """Echo pings, then take what comes for that long; Mbps of it, headers not counted."""
    with socket.create_server((address, 0)) as server:
        _print_number(server.getsockname()[1])
        connection = server.accept()[0]
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(NUM_PINGS):
            connection.sendall(connection.recv(1))
        warm_s = time.monotonic() + WARM_UP * seconds
        _take(connection, warm_s)
        begun_s = time.monotonic()
        num_bytes = _take(connection, begun_s + (1 - WARM_UP) * seconds)
        return num_bytes * 8 / 1e6 / (time.monotonic() - begun_s)


def send(address: str, port: int) -> float:
    """Ping, then send until the other end has enough; the median round trip in ms."""
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trip_s = statistics.median(_ping_s(connection) for _ in range(NUM_PINGS))
        with suppress(ConnectionError):
            while True:
                connection.sendall(bytes(CHUNK_BYTES))
    return round_trip_s * 1000


def _ping_s(connection: socket.socket) -> float:
    began_s = time.monotonic()
    connection.sendall(b"p")
    connection.recv(1)
    return time.monotonic() - began_s


def _take(connection: socket.socket, until_s: float) -> int:
    buffer, num_bytes = bytearray(CHUNK_BYTES), 0
    while time.monotonic() < until_s:
        num_bytes += connection.recv_into(buffer)
    return num_bytes


def _print_number(number: float) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the command."""
    match sys.argv[1:]:
        case ["receive", address, seconds]:
            result = receive(address, float(seconds))
        case ["send", address, port]:
            result = send(address, int(port))
        case _:
            sys.exit(__doc__)
    _print_number(result)


if __name__ == "__main__":
    main()
