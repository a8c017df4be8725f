"""Hosts as network namespaces on one bridge, each behind a link of its own. Needs root and Linux.

Nothing leaves these namespaces: the bridge lies in one that has no other interface.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

BURST_S = 0.005
"""What may leave a link at once, in seconds of its rate; the kernel needs at least some packets."""
MIN_BURST_BYTES = 16_000
QUEUE_S = 0.2
"""How long a packet may wait in a link's queue before it is dropped."""


@dataclass(frozen=True, slots=True)
class Link:
    """A home link, in Mbps; None is not shaped.

    Attributes:
        delay_ms: that packets take from one such link to another; half of it either way here.
    """

    up_mbps: float | None = None
    down_mbps: float | None = None
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one address; without a name, this machine itself."""

    namespace: str
    address: str

    def command(self, *arguments: str) -> tuple[str, ...]:
        """A command as it is to be run to run there."""
        if not self.namespace:
            return arguments
        return "ip", "netns", "exec", self.namespace, *arguments


THIS_MACHINE = Host("", "127.0.0.1")


class Lab:
    """Use it in a `with`; hosts are made by `host` and all gone at the end.

    Raises:
        PermissionError: this is not root.
    """

    def __init__(self) -> None:
        if os.geteuid() != 0:
            raise PermissionError("network namespaces need root: run it with sudo")
        self._name = f"lab{os.getpid()}"
        self._hub = f"{self._name}-hub"
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for namespace in (*(host.namespace for host in self._hosts), self._hub):
            pids = _run("ip", "netns", "pids", namespace).split()
            if pids:
                subprocess.run(["kill", "-9", *pids], check=False)
            _run("ip", "netns", "del", namespace)

    def host(self, link: Link | None = None) -> Host:
        """Another host, behind a link like that."""
        link, number = link or Link(), len(self._hosts) + 1
        host = Host(f"{self._name}-{number}", f"10.91.0.{number}")
        inside, outside = "eth0", f"port{number}"
        _run("ip", "netns", "add", host.namespace)
        self._hosts.append(host)
        pair = ("link", "add", outside, "type", "veth", "peer", "name", inside)
        _run("ip", "-n", self._hub, *pair, "netns", host.namespace)
        _run("ip", "-n", self._hub, "link", "set", outside, "master", "bridge", "up")
        _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", inside)
        for device in ("lo", inside):
            _run("ip", "-n", host.namespace, "link", "set", device, "up")
        # As most machines have it, whatever this one has: flows share a link otherwise with BBR.
        route = ("10.91.0.0/24", "dev", inside, "src", host.address, "congctl", "cubic")
        _run("ip", "-n", host.namespace, "route", "replace", *route)
        _shape(host.namespace, inside, link.up_mbps)
        _shape(self._hub, outside, link.down_mbps)
        return host

    def sent_bytes(self, host: Host) -> int:
        """What left a host by now, headers and all."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_run(*host.command("cat", path)))

    def cpu_s(self, host: Host) -> float:
        """Seconds of a CPU that the processes which run on a host have used by now."""
        pids = _run("ip", "netns", "pids", host.namespace).split()
        return sum(_ticks(pid) for pid in pids) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: str) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0  # gone meanwhile
    # proc(5): utime and stime are fields 14 and 15; the second, a name, may hold spaces.
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _shape(namespace: str, device: str, mbps: float | None) -> None:
    if mbps is None:
        return
    burst_bytes = max(MIN_BURST_BYTES, int(mbps * 1e6 / 8 * BURST_S))
    bucket = ("rate", f"{mbps}mbit", "burst", f"{burst_bytes}", "latency", f"{QUEUE_S * 1000}ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
