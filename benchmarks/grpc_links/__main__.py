"""Prints what messages of 0.8 MB do over slow and distant links, and what could make them faster.

    sudo python -m benchmarks.grpc_links --mbps 100 --delays 0,25,50,100 --json FILE

Each row is a connection of its own between two hosts of a lab. `ideal` is what a message takes
there and its answer back when nothing but the link is in its way.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.grpc_links.figures import LONG_GAP_S, MESSAGE_BYTES, SHORT_GAP_S, Figures
from benchmarks.grpc_links.variants import Variant, variants
from benchmarks.lab import Lab, Link
from benchmarks.lab.host import exchange
from benchmarks.lab.namespaces import run

ENDS = "benchmarks.grpc_links.ends"
PACKET_BYTES, PACKET_PAYLOAD_BYTES = 1514, 1448
HEADERS = (
    f"{'ms':>4} {'connection':20} {'Mbps':>6} {'ahead MB':>8} {'ideal ms':>8} {'warm':>6}"
    f" {f'{SHORT_GAP_S:g} s idle':>10} {f'{LONG_GAP_S:g} s idle':>10} {'new':>6}\n"
)


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    rows = []
    sys.stdout.write(HEADERS)
    for delay_ms in options.delays:
        for variant in _chosen(options.only):
            figures = measured(variant, Link(options.mbps, options.mbps, delay_ms))
            sys.stdout.write(_line(variant, options.mbps, delay_ms, figures))
            sys.stdout.flush()
            rows.append({"connection": variant.name, "delay_ms": delay_ms, **asdict(figures)})
    if options.json:
        document = {"mbps": options.mbps, "message_bytes": MESSAGE_BYTES, "rows": rows}
        options.json.write_text(f"{json.dumps(document, indent=2)}\n", encoding="utf-8")


def measured(variant: Variant, link: Link) -> Figures:
    """Measure a variant between two hosts with such links.

    Raises:
        RuntimeError: one of its ends failed; it has printed why.
    """
    with Lab(variant.congestion_control) as lab:
        near, far = lab.host(link), lab.host(link)
        for host in (near, far):
            if variant.sysctl:
                run(*host.command("sysctl", "-qw", variant.sysctl))
        serve = ("serve", variant.kind, far.address, json.dumps(variant.server))
        with far.running(ENDS, *serve) as server:
            endpoint = f"{far.address}:{exchange(server)}"
            send = ("send", variant.kind, endpoint, json.dumps(variant.channel))
            with near.running(ENDS, *send) as sender:
                return Figures(**json.loads(exchange(sender)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbps", type=float, default=100.0, help="of both links, either way")
    parser.add_argument("--delays", type=_numbers, default=[0.0, 25.0, 50.0, 100.0], help="in ms")
    parser.add_argument("--only", default="", help="names that begin so, several with `/`")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    return parser


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _chosen(names: str) -> list[Variant]:
    return [v for v in variants() if v.name.startswith(tuple(names.split("/")))]


def _line(variant: Variant, mbps: float, delay_ms: float, figures: Figures) -> str:
    packets = MESSAGE_BYTES / PACKET_PAYLOAD_BYTES
    ideal_ms = 2 * delay_ms + packets * PACKET_BYTES * 8 / mbps / 1000
    ahead_mb = figures.ahead_bytes / 1e6
    return (
        f"{delay_ms:4g} {variant.name:20} {figures.stream_mbps:6.1f} {ahead_mb:8.1f}"
        f" {ideal_ms:8.0f} {figures.warm_ms:6.0f} {figures.short_gap_ms:10.0f}"
        f" {figures.long_gap_ms:10.0f} {figures.first_ms:6.0f}\n"
    )


if __name__ == "__main__":
    main()
