"""Machines joined by slow links, on this one: network namespaces and shaped veth pairs."""

from benchmarks.lab.hosts import THIS_MACHINE, Host, Lab, Link
from benchmarks.lab.processes import LabProcesses
from benchmarks.lab.swarm import LabSwarm

__all__ = ["THIS_MACHINE", "Host", "Lab", "LabProcesses", "LabSwarm", "Link"]
