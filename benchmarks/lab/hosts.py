"""Hosts as network namespaces on one bridge, each behind a link of its own. Needs root and Linux.

Nothing leaves these namespaces: the bridge lies in one that has no other interface. Their addresses
are loopback addresses, as all of them are this machine: what stays on this machine (`--insecure`)
may be measured here too.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Self

from benchmarks.lab.host import Host, ask
from benchmarks.lab.namespaces import namespaces, remove_leftovers, remove_namespaces, run

FAMILY = "lab"
NETWORK = "127.91.0.0/24"
BURST_S = 0.005
"""What may leave a link at once, in seconds of its rate; the kernel needs at least some packets."""
MIN_BURST_BYTES = 16_000
GSO_BYTES = 65_536
"""Of a packet, at most: Linux's own limit."""
PACKET_SHARE = 0.9
"""Of a burst, what the kernel may send as one packet, of many segments whose headers come on top.
A larger one would be cut into segments in front of the link, which takes five times the CPU."""
QUEUE_MS = 200.0
"""How long a packet may wait in a link's queue before it is dropped, if not told otherwise."""


@dataclass(frozen=True, slots=True)
class Link:
    """A home link.

    Attributes:
        up_mbps: None is not shaped.
        down_mbps: None is not shaped.
        delay_ms: that packets take from a host with such a link to another with such a link,
            besides what they wait in queues. Each link has half of it, either way, so between
            links that differ it is the mean of both. 0: none but this machine's own.
        queue_ms: that packets wait at most before some are dropped; home routers have such queues.
    """

    up_mbps: float | None = None
    down_mbps: float | None = None
    delay_ms: float = 0.0
    queue_ms: float = QUEUE_MS

    def __post_init__(self) -> None:
        if any(mbps is not None and mbps <= 0 for mbps in (self.up_mbps, self.down_mbps)):
            raise ValueError(
                f"expected Mbps above 0, or None for a link that is not shaped: {self}"
            )
        if self.delay_ms < 0:
            raise ValueError(f"expected a delay of 0 ms or more: {self}")


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
        if os.geteuid() != 0:
            raise PermissionError("network namespaces need root: run it with sudo")
        self._congestion_control = congestion_control
        self._idle_restart = idle_restart
        self._name = ""
        self._num_hosts = 0
        self._slowest_mbps: dict[Host, float] = {}
        self._wires: Popen[str] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        remove_leftovers(FAMILY)
        self._name = _free_name()
        with ExitStack() as stack:
            stack.callback(remove_namespaces, f"{self._name}-")
            run("ip", "netns", "add", self._hub.namespace)
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
        host = Host(f"{self._name}-{self._num_hosts}", f"127.91.0.{self._num_hosts}")
        run("ip", "netns", "add", host.namespace)
        inside, outside = f"host{self._num_hosts}", f"port{self._num_hosts}"
        self._plug(inside, outside, link.delay_ms / 2 / 1000)
        self._in_hub("link", "set", inside, "netns", host.namespace, "name", "eth0")
        self._in_hub("link", "set", outside, "master", "bridge", "up")
        _set_up(host, self._congestion_control)
        restart = f"net.ipv4.tcp_slow_start_after_idle={int(self._idle_restart)}"
        run(*host.command("sysctl", "-qw", restart))
        if link.up_mbps is not None:
            _limit_packets(host.namespace, link.up_mbps)
        _shape(host.namespace, "eth0", link.up_mbps, link.queue_ms)
        _shape(self._hub.namespace, outside, link.down_mbps, link.queue_ms)
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
        _limit_packets(sender.namespace, self._slowest_mbps[sender])
        number = receiver.address.rpartition(".")[2]
        place = ("dev", "eth0", "parent", "1:")
        run(*tc, "class", "add", *place, "classid", f"1:{number}", "htb", "rate", "32gbit")
        bucket = _bucket(mbps, queue_ms)
        run(*tc, "qdisc", "add", "dev", "eth0", "parent", f"1:{number}", *bucket)
        match = ("u32", "match", "ip", "dst", f"{receiver.address}/32", "flowid", f"1:{number}")
        run(*tc, "filter", "add", *place, "protocol", "ip", *match)

    def sent_bytes(self, host: Host) -> int:
        """What left a host by now, headers and all."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(run(*host.command("cat", path)))

    def cpu_s(self, host: Host) -> float:
        """Seconds of a CPU that the processes which run on a host have used by now."""
        pids = run("ip", "netns", "pids", host.namespace).split()
        return sum(_ticks(pid) for pid in pids) / os.sysconf("SC_CLK_TCK")

    @property
    def _hub(self) -> Host:
        return Host(f"{self._name}-hub", "")

    def _in_hub(self, *arguments: str) -> None:
        run("ip", "-n", self._hub.namespace, *arguments)

    def _plug(self, inside: str, outside: str, delay_s: float) -> None:
        """Make two devices in the hub of which each receives what the other sends."""
        if not delay_s:
            self._in_hub("link", "add", outside, "type", "veth", "peer", "name", inside)
            return
        if self._wires is None:
            self._wires = self._stack.enter_context(self._hub.running("benchmarks.lab.wire"))
        ask(self._wires, f"{inside} {outside} {delay_s}")


def _free_name() -> str:
    names = namespaces()
    tried = (f"{FAMILY}{os.getpid()}-{number}" for number in count(1))
    return next(name for name in tried if f"{name}-hub" not in names)


def _set_up(host: Host, congestion_control: str) -> None:
    ip = ("ip", "-n", host.namespace)
    run(*ip, "link", "set", "lo", "up")
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


def _shape(namespace: str, device: str, mbps: float | None, queue_ms: float) -> None:
    if mbps is not None:
        bucket = _bucket(mbps, queue_ms)
        run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _bucket(mbps: float, queue_ms: float) -> tuple[str, ...]:
    rate = ("rate", f"{int(mbps * 1e6)}bit", "burst", f"{_burst_bytes(mbps)}")
    return "tbf", *rate, "latency", f"{queue_ms}ms"


def _limit_packets(namespace: str, mbps: float) -> None:
    num_bytes = min(GSO_BYTES, int(_burst_bytes(mbps) * PACKET_SHARE))
    run("ip", "-n", namespace, "link", "set", "eth0", "gso_max_size", f"{num_bytes}")


def _burst_bytes(mbps: float) -> int:
    return max(MIN_BURST_BYTES, int(mbps * 1e6 / 8 * BURST_S))
