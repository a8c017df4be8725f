"""The real properties of a path between two hosts of a lab: TCP bytes sent, and round trips.

sudo python -m benchmarks.lab.check --mbps 100 --delay-ms 50
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from benchmarks.lab.host import Host, exchange
from benchmarks.lab.hosts import Lab
from benchmarks.lab.hub import Link

SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    """One way between two hosts.

    Attributes:
        mbps: of TCP's payload, once it is under way; headers take 4 % of a link's rate.
        round_trip_ms: median of small packets there and back, with nothing else on the path.
    """

    mbps: float
    round_trip_ms: float

    def __str__(self) -> str:
        return f"{self.mbps:.4g} Mbps, {self.round_trip_ms:.4g} ms there and back"


def measure(from_host: Host, to_host: Host, seconds: float = SECONDS) -> MeasuredPath:
    """Measure a path that is idle; rates count in the second half of that many seconds.

    Raises:
        RuntimeError: one of its ends failed; it has printed why.
    """
    end = "benchmarks.lab.probe"
    with to_host.running(end, "receive", to_host.address, str(seconds)) as receiver:
        port = exchange(receiver)
        with from_host.running(end, "send", to_host.address, port) as sender:
            return MeasuredPath(
                mbps=float(exchange(receiver)), round_trip_ms=float(exchange(sender))
            )


def main() -> None:
    """Measure the link that the options describe."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbps", type=float, help="of both links; without it, not shaped")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="from one host to the other")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    link = Link(options.mbps, options.mbps, options.delay_ms)
    with Lab() as lab:
        path = measure(lab.host(link), lab.host(link), options.seconds)
    sys.stdout.write(f"asked {link.up_mbps} Mbps and {link.delay_ms} ms, measured {path}\n")


if __name__ == "__main__":
    main()
