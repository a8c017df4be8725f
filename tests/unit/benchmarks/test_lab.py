"""Hosts behind slow links, for real: rates, delays, order, and that nothing stays behind."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.lab import Host, Lab, Link
from benchmarks.lab.check import measure
from benchmarks.lab.namespaces import namespaces, run
from swarm_ft.protocol.spec.bounds import is_loopback

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="delays need /dev/net/tun"),
    pytest.mark.xdist_group("lab"),
]

UP_MBPS, DOWN_MBPS, DELAY_MS = 8.0, 30.0, 30.0
LATE_MS = 6.0
"""What a busy machine may add to a round trip."""


@dataclass(frozen=True)
class Place:
    near: Host
    far: Host
    shaped: Host
    hub: Host


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    delayed = Link(UP_MBPS, DOWN_MBPS, DELAY_MS)
    with Lab() as lab:
        yield Place(
            near=lab.host(delayed),
            far=lab.host(delayed),
            shaped=lab.host(Link(UP_MBPS, DOWN_MBPS)),
            hub=lab.host(),
        )


def is_close(mbps: float, configured_mbps: float) -> bool:
    return 0.9 * configured_mbps < mbps <= configured_mbps


def test_a_delayed_path_has_the_rate_of_its_uplink_and_twice_the_delay(place: Place) -> None:
    path = measure(place.near, place.far, seconds=1.2)
    assert is_close(path.mbps, UP_MBPS)
    assert 2 * DELAY_MS <= path.round_trip_ms < 2 * DELAY_MS + LATE_MS


def test_one_delayed_link_is_half_the_delay_and_down_is_not_up(place: Place) -> None:
    path = measure(place.hub, place.near, seconds=1.2)
    assert is_close(path.mbps, DOWN_MBPS)
    assert DELAY_MS <= path.round_trip_ms < DELAY_MS + LATE_MS


def test_without_a_delay_there_is_none_and_the_rate_is_as_asked(place: Place) -> None:
    path = measure(place.shaped, place.hub, seconds=1.0)
    assert is_close(path.mbps, UP_MBPS)
    assert path.round_trip_ms < LATE_MS


RECEIVE = """
import socket, sys
server = socket.create_server(("", 0))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    datagrams.bind(("", 0))
    datagrams.settimeout(10)
    print(datagrams.getsockname()[1], flush=True)
    print(*(int.from_bytes(datagrams.recv(2000)[:4], "big") for _ in range(int(sys.argv[1]))))
"""
SEND = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    for number in range(int(sys.argv[3])):
        datagrams.sendto(number.to_bytes(4, "big") + bytes(number), (sys.argv[1], int(sys.argv[2])))
"""


def test_packets_arrive_in_the_order_in_which_they_left_and_none_is_lost(place: Place) -> None:
    count = 100  # all of them fit a receiver's buffer, whenever it has its turn
    receive = place.far.command(sys.executable, "-c", RECEIVE, str(count))
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        send = (sys.executable, "-c", SEND, place.far.address, port, str(count))
        run(*place.near.command(*send))
        assert receiver.stdout.read().split() == [str(number) for number in range(count)]


def namespaces_of(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"lab{pid}-")]


def processes_in(names: list[str]) -> list[int]:
    """Handles of the processes there; they become readable when these end."""
    pids = [pid for name in names for pid in run("ip", "netns", "pids", name).split()]
    return [os.pidfd_open(int(pid)) for pid in pids]


def all_end(processes: list[int]) -> bool:
    ended = [bool(select.select([process], [], [], 10.0)[0]) for process in processes]
    for process in processes:
        os.close(process)
    return all(ended)


def test_all_hosts_are_this_machine(place: Place) -> None:
    """Measurements may run there without leaving this machine."""
    assert all(is_loopback(host.address) for host in (place.near, place.far, place.hub))


def test_labs_do_not_meet_and_leave_nothing_behind() -> None:
    before, delayed = namespaces_of(os.getpid()), Link(delay_ms=2.0)
    with Lab() as lab, Lab() as other:
        assert lab.host(delayed).address == other.host(delayed).address
        made = set(namespaces_of(os.getpid())) - set(before)
        wires = processes_in(sorted(made))
        assert len(made) == 4
        assert len(wires) == 2
    assert namespaces_of(os.getpid()) == before
    assert all_end(wires)


@pytest.mark.parametrize("idle_restart", [True, False])
def test_tcp_forgets_a_path_in_a_pause_or_not(idle_restart: bool) -> None:
    with Lab(idle_restart=idle_restart) as lab:
        value = run(*lab.host().command("sysctl", "-n", "net.ipv4.tcp_slow_start_after_idle"))
    assert int(value) == idle_restart


KILLED = """
import subprocess, sys
from benchmarks.lab import Lab, Link
with Lab() as lab:
    host = lab.host(Link(delay_ms=2.0))
    subprocess.Popen(host.command("sleep", "600"), stdout=subprocess.DEVNULL)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_lab_takes_its_wires_along_and_the_next_one_removes_the_rest() -> None:
    command = (sys.executable, "-c", KILLED)
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as lab:
        assert lab.stdout is not None
        assert lab.stdout.readline() == "ready\n"
        hub = [name for name in namespaces_of(lab.pid) if name.endswith("-hub")]
        wires = processes_in(hub)
        assert len(wires) == 1
        lab.send_signal(signal.SIGKILL)
    assert all_end(wires)
    rest = processes_in(namespaces_of(lab.pid))
    assert len(rest) == 1
    with Lab():
        assert namespaces_of(lab.pid) == []
    assert all_end(rest)


def test_a_lab_that_fails_leaves_nothing_behind() -> None:
    before = namespaces_of(os.getpid())

    def fail() -> None:
        with Lab() as lab:
            lab.host(Link(delay_ms=2.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert namespaces_of(os.getpid()) == before


@pytest.mark.parametrize("wrong", [{"up_mbps": 0.0}, {"down_mbps": -1.0}, {"delay_ms": -1.0}])
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Link(**wrong)
