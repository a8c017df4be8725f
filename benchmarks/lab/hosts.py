"""Hosts as network namespaces on one bridge, each behind a link of its own. Needs root and Linux.

Nothing leaves these namespaces: the bridge lies in one that has no other interface. Their addresses
are loopback addresses, as all of them are this machine: what stays on this machine (`--insecure`)
may be measured here too.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.lab.host import Host
from benchmarks.lab.hub import Hub, Link, bucket, limit_packets
from benchmarks.lab.namespaces import run

FAMILY = "lab"
NETWORK = "127.91.0.0/24"


class Lab:
    """Use it in a `with`; hosts are made by `host` and all gone at the end.

    Any number of labs may be there at once, and do not reach each other. What a lab that was
    killed left behind is removed by the next one.

    Args:
        congestion_control: of TCP on all hosts, whatever this machine has; cubic is what Linux,
            macOS and Windows have as they come.
        idle_restart: TCP forgets what a path carries while little is sent, as Linux does as it
            comes (net.ipv4.tcp_slow_start_after_idle).

    Raises:
        PermissionError: this is not root.
    """

    def __init__(self, congestion_control: str = "cubic", *, idle_restart: bool = True) -> None:
        self._hub = Hub(FAMILY)
        self._congestion_control = congestion_control
        self._idle_restart = idle_restart
        self._num_hosts = 0
        self._slowest_mbps: dict[Host, float] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._hub)
            self._in_hub("link", "add", "bridge", "type", "bridge")
            self._in_hub("link", "set", "bridge", "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def host(self, link: Link | None = None) -> Host:
        """Another host, behind a link like that."""
        link = link or Link()
        self._num_hosts += 1
        host = Host(self._hub.add(f"{self._num_hosts}"), f"127.91.0.{self._num_hosts}")
        port = self._hub.plug(link, host.namespace, "eth0")
        self._in_hub("link", "set", port, "master", "bridge", "up")
        _set_up(host, self._congestion_control)
        restart = f"net.ipv4.tcp_slow_start_after_idle={int(self._idle_restart)}"
        run(*host.command("sysctl", "-qw", restart))
        return host

    def join(self, first: Host, second: Host, link: Link) -> None:
        """Give two hosts a link of their own: what they send each other passes no other one.

        Args:
            first: sends to the other at `up_mbps`.
            second: sends to the other at `down_mbps`.
            link: its delay is not looked at.
        """
        for sender, receiver, mbps in (
            (first, second, link.up_mbps),
            (second, first, link.down_mbps),
        ):
            if mbps is not None:
                self._shape_pair(sender, receiver, mbps, link.queue_ms)

    def _shape_pair(self, sender: Host, receiver: Host, mbps: float, queue_ms: float) -> None:
        tc = ("tc", "-n", sender.namespace)
        if sender not in self._slowest_mbps:
            run(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb")
        self._slowest_mbps[sender] = min(mbps, self._slowest_mbps.get(sender, mbps))
        limit_packets(sender.namespace, "eth0", self._slowest_mbps[sender])
        number = receiver.address.rpartition(".")[2]
        place = ("dev", "eth0", "parent", "1:")
        run(*tc, "class", "add", *place, "classid", f"1:{number}", "htb", "rate", "32gbit")
        queue = bucket(mbps, queue_ms)
        run(*tc, "qdisc", "add", "dev", "eth0", "parent", f"1:{number}", *queue)
        match = ("u32", "match", "ip", "dst", f"{receiver.address}/32", "flowid", f"1:{number}")
        run(*tc, "filter", "add", *place, "protocol", "ip", *match)

    def sent_bytes(self, host: Host) -> int:
        """Count the bytes that a host has sent, headers included."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(run(*host.command("cat", path)))

    def cpu_s(self, host: Host) -> float:
        """Seconds of a CPU that the processes which run on a host have used by now."""
        pids = run("ip", "netns", "pids", host.namespace).split()
        return sum(_ticks(pid) for pid in pids) / os.sysconf("SC_CLK_TCK")

    def _in_hub(self, *arguments: str) -> None:
        run("ip", "-n", self._hub.namespace, *arguments)


def _set_up(host: Host, congestion_control: str) -> None:
    ip = ("ip", "-n", host.namespace)
    # As Linux comes, all of 127.0.0.0/8 is on `lo`, and on no other device.
    run(*ip, "addr", "del", "127.0.0.1/8", "dev", "lo")
    run(*ip, "addr", "add", "127.0.0.1/32", "dev", "lo")
    run(*host.command("sysctl", "-qw", "net.ipv4.conf.eth0.route_localnet=1"))
    run(*ip, "addr", "add", f"{host.address}/24", "dev", "eth0", "scope", "global")
    run(*ip, "link", "set", "eth0", "up")
    route = ("route", "change", NETWORK, "dev", "eth0", "src", host.address)
    run("ip", "-n", host.namespace, *route, "congctl", congestion_control)


def _ticks(pid: str) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0  # gone meanwhile
    # proc(5): utime and stime are fields 14 and 15; the second, a name, may hold spaces.
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
