"""Machines joined by slow links, on this one: network namespaces, shaped and delayed."""

from benchmarks.lab.host import THIS_MACHINE, Host
from benchmarks.lab.hosts import Lab
from benchmarks.lab.hub import QUEUE_MS, Link
from benchmarks.lab.processes import LabProcesses
from benchmarks.lab.swarm import LabSwarm

__all__ = ["QUEUE_MS", "THIS_MACHINE", "Host", "Lab", "LabProcesses", "LabSwarm", "Link"]
