"""Links of a lab: pairs of devices, shaped and delayed, all made in one namespace. Needs root.

Nothing leaves a lab's namespaces: the hub has no interface but the ends of its own links.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from subprocess import Popen
from types import TracebackType
from typing import Self

from benchmarks.lab.host import Host, exchange
from benchmarks.lab.namespaces import namespaces, remove_leftovers, remove_namespaces, run

BURST_S = 0.005
"""What may leave a link at once, in seconds of its rate; the kernel needs at least a packet."""
MIN_BURST_BYTES = 1_600
"""That is one. What is in a burst is sent for nothing, and where a lab is slower than what it
imitates, and its tensors are smaller, a whole frame is ten packets."""
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


class Hub:
    """The namespace in which all links of a lab meet; use it in a `with`, which removes all.

    What one that was killed left behind is removed by the next one of its family.

    Args:
        family: how the names of its namespaces begin.

    Raises:
        PermissionError: this is not root.
    """

    def __init__(self, family: str) -> None:
        if os.geteuid() != 0:
            raise PermissionError("network namespaces need root: run it with sudo")
        self._family = family
        self._name = ""
        self._num_links = 0
        self._wires: Popen[str] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        remove_leftovers(self._family)
        self._name = _free_name(self._family)
        with ExitStack() as stack:
            stack.callback(remove_namespaces, f"{self._name}-")
            run("ip", "netns", "add", self.namespace)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def namespace(self) -> str:
        """Its own."""
        return f"{self._name}-hub"

    def add(self, name: str) -> str:
        """Add a namespace with a loopback and return its name."""
        namespace = f"{self._name}-{name}"
        run("ip", "netns", "add", namespace)
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        return namespace

    def plug(self, link: Link, namespace: str, device: str) -> str:
        """Link a new device in a namespace to a new one here, whose name this is; both are down."""
        self._num_links += 1
        near, far = f"near{self._num_links}", f"port{self._num_links}"
        self._join(near, far, link.delay_ms / 2 / 1000)
        run("ip", "-n", self.namespace, "link", "set", near, "netns", namespace, "name", device)
        limit_packets(namespace, device, link.up_mbps)
        _shape(namespace, device, link.up_mbps, link.queue_ms)
        _shape(self.namespace, far, link.down_mbps, link.queue_ms)
        return far

    def _join(self, near: str, far: str, delay_s: float) -> None:
        """Make two devices of which each receives what the other sends."""
        if not delay_s:
            veth = ("type", "veth", "peer", "name", near)
            run("ip", "-n", self.namespace, "link", "add", far, *veth)
            return
        if self._wires is None:
            own_host = Host(self.namespace, "")
            self._wires = self._stack.enter_context(own_host.running("benchmarks.lab.wire"))
        exchange(self._wires, f"{near} {far} {delay_s}")


def bucket(mbps: float, queue_ms: float) -> tuple[str, ...]:
    """Return the arguments of tc for a queue of this rate."""
    rate = ("rate", f"{int(mbps * 1e6)}bit", "burst", f"{_burst_bytes(mbps)}")
    return "tbf", *rate, "latency", f"{queue_ms}ms"


def limit_packets(namespace: str, device: str, mbps: float | None) -> None:
    """Let a device have no packets that are too large for a link of that rate."""
    if mbps is not None:
        most = max(MIN_BURST_BYTES, int(_burst_bytes(mbps) * PACKET_SHARE))
        size = ("gso_max_size", f"{min(GSO_BYTES, most)}")
        run("ip", "-n", namespace, "link", "set", device, *size)


def _shape(namespace: str, device: str, mbps: float | None, queue_ms: float) -> None:
    if mbps is not None:
        queue = bucket(mbps, queue_ms)
        run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *queue)


def _burst_bytes(mbps: float) -> int:
    return max(MIN_BURST_BYTES, int(mbps * 1e6 / 8 * BURST_S))


def _free_name(family: str) -> str:
    names = namespaces()
    tried = (f"{family}{os.getpid()}-{number}" for number in count(1))
    return next(name for name in tried if f"{name}-hub" not in names)
