"""The way into a swarm for a benchmark's own process: the options in `LabSwarm.ways`."""

from __future__ import annotations

import argparse

from swarm_ft.api.connections import DHT_PREFIX, SwarmAddress
from swarm_ft.identity.invites import parse_invite


def add_way(parser: argparse.ArgumentParser) -> None:
    """Give a command the options of a `WayIn`."""
    parser.add_argument("--invite", type=parse_invite, help="links are then encrypted")
    parser.add_argument("--insecure", action="store_true", help="they are plaintext")
    parser.add_argument("--initial-peers", action="append", default=[], metavar="MADDR")


def way_of(options: argparse.Namespace) -> SwarmAddress:
    """Return the address of the swarm that the options name."""
    nodes = tuple(options.initial_peers)
    return SwarmAddress(invite=options.invite, initial_peers=nodes, dht_prefix=DHT_PREFIX)
