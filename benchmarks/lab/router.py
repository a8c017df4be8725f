"""A box between a home and the internet: its address, NAT, firewall, and what it counts.

Filtering and translating is nftables' work, in one table. Needs root, Linux and nft.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import AbstractContextManager
from dataclasses import replace
from ipaddress import IPv4Network, IPv6Network
from typing import Literal

from benchmarks.lab.capture import Capture, capture
from benchmarks.lab.host import Host
from benchmarks.lab.namespaces import configure, run

Kind = Literal["open", "cone", "symmetric", "reject"]

TCP = "congctl cubic"
"""Of a route: what Linux, macOS and Windows have as they come, whatever this machine has."""
OUTER, INNER = "outer", "inner"
"""How its devices are called."""
TABLE = "box"
MAPPED, MAPPED_IN, MAPPED_OUT = "mapped", "mapped_in", "mapped_out"
"""Chains for whoever maps ports."""
SYN = "tcp flags & (fin | syn | rst | ack) == syn"
# A cut link is one of which all is dropped: addresses, routes and mappings stay, as they do when a
# cable is pulled further away.
OPEN = f"""
table inet {TABLE} {{
  set cut {{ type ifname; }}
  counter accepted {{ }}
  counter refused {{ }}
  chain arriving {{
    type filter hook prerouting priority raw
    iifname @cut drop
  }}
  chain leaving {{
    type filter hook postrouting priority 300
    oifname @cut drop
    iifname {OUTER} {SYN} ct state new counter name accepted
  }}
  chain heard {{
    type filter hook input priority 300
    iifname {OUTER} {SYN} ct state new counter name accepted
  }}
}}
"""
"""What every box has: what is counted as accepted has passed whatever filters there are."""
CLOSED = f"""
table inet {TABLE} {{
  chain {MAPPED} {{ }}
  chain {MAPPED_IN} {{ }}
  chain {MAPPED_OUT} {{ }}
  chain unasked {{
    {SYN} counter name refused
    %(answer)s
    drop
  }}
  chain input {{
    type filter hook input priority filter
    ct state established,related accept
    meta l4proto {{ icmp, ipv6-icmp }} accept
    iifname {OUTER} jump unasked
  }}
  chain forward {{
    type filter hook forward priority filter
    ct state established,related accept
    ct state invalid jump unasked
    ct status dnat accept
    jump {MAPPED}
    iifname {OUTER} %(closed_to)s jump unasked
  }}
  chain destination {{
    type nat hook prerouting priority dstnat
    jump {MAPPED_IN}
    %(forwards)s
  }}
  chain source {{
    type nat hook postrouting priority srcnat
    jump {MAPPED_OUT}
    oifname {OUTER} meta nfproto ipv4 masquerade %(ports)s
  }}
}}
"""
"""What a box with NAT has besides."""
RESET = "meta l4proto tcp reject with tcp reset"
RANDOM_PORTS = "random,fully-random"
STRICT = "net.netfilter.nf_conntrack_tcp_loose=0"
"""A connection is known by its beginning only: what belongs to one that was forgotten is dropped,
or a cone would give it the same port again, and nobody would notice."""


class Router:
    """A box with a side to the internet; without NAT, it is the machine itself.

    Attributes:
        host: where it is, with its outer addresses, to run there what routers run.
    """

    def __init__(self, namespace: str, ipv4: IPv4Network, ipv6: IPv6Network | None) -> None:
        self.host = Host(namespace, "", str(ipv6[2]) if ipv6 else "")
        self._ipv4, self._ipv6 = ipv4, ipv6
        self._num_addresses = 1  # the first one is the gateway's, here as of IPv6
        self._nft(OPEN)

    def guard(
        self, kind: Kind, forwards: dict[int, str] | None = None, *, firewall_ipv6: bool
    ) -> None:
        """Translate, and let nobody in unasked, but to `forwards`: hosts by their TCP ports."""
        places = (forwards or {}).items()
        dnat = (f"iifname {OUTER} tcp dport {port} dnat ip to {place}" for port, place in places)
        rules = CLOSED % {
            "answer": RESET if kind == "reject" else "",
            "closed_to": "" if firewall_ipv6 else "meta nfproto ipv4",
            "forwards": "\n    ".join(dnat),
            "ports": RANDOM_PORTS if kind == "symmetric" else "",
        }
        self._nft(rules)
        run(*self.host.command("sysctl", "-qw", STRICT))

    def connect(self) -> None:
        """Bring the outer side up, once it is there."""
        words = [f"link set {OUTER} up"]
        if self._ipv6:
            words += [
                f"addr add {self._ipv6[2]}/{self._ipv6.prefixlen} dev {OUTER} nodad",
                f"route add ::/0 via {self._ipv6[1]} {TCP}",
            ]
        configure(self.host.namespace, *words)
        self.change_address()

    @property
    def num_accepted(self) -> int:
        """TCP connections from outside that were let in without a request from inside.

        More exactly, their SYNs: one that got no answer comes again.
        """
        return count_of(self.host.namespace, f"inet {TABLE} accepted")

    @property
    def num_refused(self) -> int:
        """SYNs from outside that were not let in."""
        return count_of(self.host.namespace, f"inet {TABLE} refused")

    def change_address(self) -> None:
        """Have another outer IPv4 address, never the same again, and forget all connections."""
        self._num_addresses += 1
        address = str(self._ipv4[self._num_addresses])
        configure(
            self.host.namespace,
            f"addr flush dev {OUTER} scope global to 0.0.0.0/0",
            f"addr add {address}/{self._ipv4.prefixlen} dev {OUTER}",
            f"route replace default via {self._ipv4[1]} {TCP}",
        )
        self.host = replace(self.host, address=address)
        self.flush_connections()

    def flush_connections(self) -> None:
        """Forget all mappings of connections, as a router that starts again does.

        Raises:
            OSError: the kernel would not.
        """
        self.host.call(_flush_connections)

    def disconnect(self) -> None:
        """Drop all that comes from outside or is sent there, from now on."""
        self._nft(f"add element inet {TABLE} cut {{ {OUTER} }}")

    def reconnect(self) -> None:
        """Drop it no more."""
        self._nft(f"flush set inet {TABLE} cut")

    def capture(self) -> AbstractContextManager[Capture]:
        """Capture the traffic of its outer side, as the internet sees it, during the context."""
        return capture(self.host, OUTER)

    def _nft(self, words: str) -> None:
        run(*self.host.command("nft", "-f", "-"), text=words)


def count_of(namespace: str, counter: str) -> int:
    """Packets that nftables counted; a counter has a family, a table and a name."""
    command = Host(namespace, "").command("nft", "-j", "list", "counter", *counter.split())
    listed = json.loads(run(*command))["nftables"]
    return sum(int(item["counter"]["packets"]) for item in listed if "counter" in item)


NETLINK_NETFILTER = 12
DELETE_CONNECTIONS = 1 << 8 | 2
"""NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE: without a word which, it means all."""
REQUEST_WITH_ANSWER = 1 | 4
"""NLM_F_REQUEST, NLM_F_ACK."""


def _flush_connections() -> None:
    """Do the same as `conntrack -F`, which is rarely installed, by the kernel's own message."""
    # nlmsghdr: length, type, flags, sequence, port; nfgenmsg: family, version, resource
    message = struct.pack("=IHHIIBBH", 20, DELETE_CONNECTIONS, REQUEST_WITH_ANSWER, 0, 0, 0, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
        netlink.send(message)
        (error,) = struct.unpack_from("=i", netlink.recv(4096), 16)  # after a header of 16 bytes
    if error:
        raise OSError(-error, f"the kernel forgets no connections: {os.strerror(-error)}")
