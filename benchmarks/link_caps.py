"""The exactness of a volunteer's caps: bytes over a capped link in each 10 s, by real TCP.

    python -m benchmarks.link_caps [--seconds 30] [--json]

Three streams share the link each way, as those to three peers do; whoever sends has more than the
cap lets pass. What arrives is counted at the far ends, in windows of 10 s that begin anew every
0.1 s; a cap that holds has no window above it, and one that is used none far below.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from itertools import accumulate

import click

from swarm_ft.reach.shaping import Gate, Shape
from swarm_ft.reach.sockets import Joint

STREAMS = 3
WINDOW_S, TICK_S = 10.0, 0.1
MBPS = 125_000.0


class Counted:
    """Bytes that arrived, in ticks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ticks: dict[int, int] = {}
        self._began_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """They are here."""
        tick = int((time.monotonic() - self._began_s) / TICK_S)
        with self._lock:
            self._ticks[tick] = self._ticks.get(tick, 0) + num_bytes

    def windows_mbps(self) -> list[float]:
        """Return the rates in every window of 10 s."""
        last = max(self._ticks, default=0)
        sums = [0, *accumulate(self._ticks.get(tick, 0) for tick in range(last))]
        size = int(WINDOW_S / TICK_S)
        rates = ((b - a) / WINDOW_S / MBPS for a, b in zip(sums, sums[size:], strict=False))
        return list(rates)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def feed(sock: socket.socket) -> None:
    """Send until the socket is closed."""
    with suppress(OSError):
        while True:
            sock.sendall(bytes(1 << 16))


def drain(sock: socket.socket, counted: Counted) -> None:
    """Count what comes, until it ends."""
    with suppress(OSError):
        while data := sock.recv(1 << 16):
            counted.add(len(data))


async def measured(mbps: float, seconds: float) -> dict[str, float]:
    """Measure the fullest and the emptiest 10 s each way, as parts of the cap."""
    shape = Shape(up=Gate(MBPS * mbps), down=Gate(MBPS * mbps))
    up, down = Counted(), Counted()
    with ExitStack() as stack:
        for _ in range(STREAMS):
            link, far = tcp_pair()
            local, own = tcp_pair()
            stack.callback(Joint(link, local, shape=shape).close)
            for sock, counted in ((far, up), (own, down)):
                stack.callback(sock.close)
                threading.Thread(target=feed, args=(sock,), daemon=True).start()
                threading.Thread(target=drain, args=(sock, counted), daemon=True).start()
        await asyncio.sleep(seconds)
    of_cap = {
        name: [rate / mbps for rate in way.windows_mbps()]
        for name, way in (("up", up), ("down", down))
    }
    return {
        "mbps": mbps,
        **{f"{name}_most": max(rates) for name, rates in of_cap.items()},
        **{f"{name}_least": min(rates) for name, rates in of_cap.items()},
    }


@click.command()
@click.option("--seconds", type=click.FloatRange(min=12), default=30.0, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(seconds: float, as_json: bool) -> None:
    """See the module."""
    if not as_json:
        click.echo("cap, Mbps   up: least - most   down: least - most   (10 s windows, of the cap)")
    for mbps in (1.0, 10.0, 100.0):
        row = asyncio.run(measured(mbps, seconds))
        if as_json:
            click.echo(json.dumps(row))
        else:
            up, down = (f"{row[f'{w}_least']:.3f} - {row[f'{w}_most']:.3f}" for w in ("up", "down"))
            click.echo(f"{mbps:9g}   {up:>15}   {down:>17}")


if __name__ == "__main__":
    main()
