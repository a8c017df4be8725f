"""Measured time and cost of steps. It knows a lab's hosts and nothing of systems."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.lab import Host, Lab


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The cost of some steps of a system.

    Attributes:
        step_s: seconds of each, as they passed here.
        cpus_used: in the mean, by all processes of the hosts.
        sent_bytes: by each host in a step, in the mean, headers and all.
    """

    step_s: tuple[float, ...]
    cpus_used: float
    sent_bytes: tuple[float, ...]


def read_steps(lab: Lab, hosts: Sequence[Host], step: Callable[[], float], count: int) -> Reading:
    """Take `count` steps.

    Args:
        lab: that the hosts belong to.
        hosts: of the system.
        step: takes one and returns its seconds. The processes of the hosts live on.
        count: 1 or more.
    """
    began_s, cpu_s = time.monotonic(), sum(map(lab.cpu_s, hosts))
    before = [lab.sent_bytes(host) for host in hosts]
    step_s = tuple(step() for _ in range(count))
    after = [lab.sent_bytes(host) for host in hosts]
    passed_s = time.monotonic() - began_s
    cpu_s = sum(map(lab.cpu_s, hosts)) - cpu_s
    sent = tuple((b - a) / count for a, b in zip(before, after, strict=True))
    return Reading(step_s=step_s, cpus_used=cpu_s / passed_s, sent_bytes=sent)
