"""Homes behind NAT, for real: each kind does what it is called for, and nothing stays behind."""

import errno
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

import pytest

from benchmarks.lab import Host, Link
from benchmarks.lab.check import measure
from benchmarks.lab.homes import Home, Household, Internet, Nat, why_not
from benchmarks.lab.namespaces import namespaces, run

ROOT = Path(__file__).parents[3]
PORT = 7001
PORTS = count(7100)
TIMEOUT_S = 50.0
DELAYED = Link(delay_ms=20.0)


def needing(home: Home) -> pytest.MarkDecorator:
    reason = why_not(home)
    return pytest.mark.skipif(bool(reason), reason=reason)


pytestmark = needing(Home())
needs_delays = needing(Home(link=DELAYED))
needs_ipv6 = needing(Home(ipv6=True))

Address = tuple[str, int]


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with Internet() as internet:
        yield internet


@pytest.fixture(scope="module")
def public(internet: Internet) -> Host:
    return internet.household(Home("open")).machines[0]


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listener(host: Host, port: int = 0, family: int = socket.AF_INET) -> socket.socket:
    """Accepts there, and gives up in time."""
    server = host.call(socket.create_server, ("", port), family=family)
    server.settimeout(TIMEOUT_S)
    return server


def dialler(host: Host, to: Address, port: int = 0) -> socket.socket:
    """Has sent a SYN from there, from a port that others may have too."""

    def dial() -> socket.socket:
        dialled = socket.socket(family_of(to[0]))
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        dialled.bind(("", port))
        dialled.setblocking(False)
        assert dialled.connect_ex(to) == errno.EINPROGRESS
        return dialled

    return host.call(dial)


def is_decided(dialled: socket.socket) -> bool:
    """Whether it is connected or refused."""
    return bool(select.select([], [dialled], [], 0)[1])


def outcome(dialled: socket.socket) -> int:
    """0: it is connected; else, what came instead."""
    assert select.select([], [dialled], [], TIMEOUT_S)[1]
    dialled.settimeout(TIMEOUT_S)
    return dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def connected(host: Host, server_host: Host, port: int = 0) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection, and from where it seems to come."""
    with listener(server_host) as server:
        dialled = dialler(host, (server_host.address, server.getsockname()[1]), port)
        accepted, _ = server.accept()
        accepted.settimeout(TIMEOUT_S)
        assert outcome(dialled) == 0
        return dialled, accepted


def seen(host: Host, server_host: Host, port: int = 0) -> Address:
    """Return the address from which a connection seems to come."""
    dialled, accepted = connected(host, server_host, port)
    with dialled, accepted:
        address: Address = accepted.getpeername()
        return address


@pytest.mark.parametrize(
    ("nat", "is_one_port"),
    [
        ("open", True),
        ("cone", True),
        ("symmetric", False),
        ("reject", True),
        ("cgnat", True),
        ("cgnat-symmetric", False),
    ],
)
def test_a_port_is_seen_as_one_by_all_or_not(
    internet: Internet, public: Host, nat: Nat, is_one_port: bool
) -> None:
    other = internet.household(Home("open")).machines[0]
    household = internet.household(Home(nat))
    addresses = {seen(household.machines[0], to, PORT) for to in (public, other, public, other)}
    assert {address for address, _ in addresses} == {household.address}
    if is_one_port:
        assert addresses == {(household.address, PORT)}
    else:
        assert len(addresses) > 1


def outermost(household: Household) -> int:
    return (household.carrier or household.router).num_refused


@pytest.mark.parametrize("nat", ["cone", "symmetric", "cgnat", "cgnat-symmetric"])
def test_who_comes_unasked_is_not_answered(internet: Internet, public: Host, nat: Nat) -> None:
    household = internet.household(Home(nat))
    with listener(household.machines[0], PORT), dialler(public, (household.address, PORT)) as comes:
        wait_until(lambda: outermost(household) > 0)
        assert not is_decided(comes)
    assert household.router.num_accepted == 0


def test_a_router_that_rejects_answers_with_a_reset(internet: Internet, public: Host) -> None:
    household = internet.household(Home("reject"))
    with listener(household.machines[0], PORT), dialler(public, (household.address, PORT)) as comes:
        assert outcome(comes) == errno.ECONNREFUSED
    assert household.router.num_refused > household.router.num_accepted == 0


def test_an_open_machine_is_reached_and_has_the_address_that_others_see(
    internet: Internet, public: Host
) -> None:
    household = internet.household(Home("open"))
    assert household.machines[0].address == household.address
    seen(public, household.machines[0])
    assert household.router.num_accepted > 0


@pytest.mark.parametrize("nat", ["cone", "symmetric"])
def test_a_forwarded_port_leads_to_the_first_machine_and_others_nowhere(
    internet: Internet, public: Host, nat: Nat
) -> None:
    household = internet.household(Home(nat, forwarded=(PORT,), num_machines=2))
    with (
        listener(household.machines[0], PORT) as server,
        dialler(public, (household.address, PORT)) as dialled,
    ):
        with closing(server.accept()[0]) as accepted:
            assert outcome(dialled) == 0
            assert accepted.getpeername()[0] == public.address
        with dialler(public, (household.address, PORT + 1)) as comes:
            wait_until(lambda: household.router.num_refused > 0)
            assert not is_decided(comes)
    assert household.router.num_accepted > 0


def test_a_carriers_nat_is_in_front_of_a_forwarded_port(internet: Internet, public: Host) -> None:
    household = internet.household(Home("cgnat", forwarded=(PORT,)))
    with dialler(public, (household.address, PORT)) as comes:
        wait_until(lambda: outermost(household) > 0)
        assert not is_decided(comes)


def punch(
    one: Household, other: Household, public: Host, stack: ExitStack
) -> tuple[socket.socket, socket.socket]:
    """Dial from each, at once, to where the public machine sees the other; never twice the same."""
    port = next(PORTS)
    machines = one.machines[0], other.machines[0]
    to_one, to_other = (seen(machine, public, port) for machine in machines)
    return (
        stack.enter_context(dialler(machines[0], to_other, port)),
        stack.enter_context(dialler(machines[1], to_one, port)),
    )


def is_punched(one: Household, other: Household, public: Host) -> bool:
    with ExitStack() as stack:
        ends = punch(one, other, public, stack)
        if any(outcome(end) for end in ends):
            return False
        ends[0].sendall(b"word")
        return ends[1].recv(4) == b"word"


@pytest.mark.parametrize(
    ("nat", "other_nat", "link"),
    [
        ("cone", "cone", Link()),
        ("cone", "cgnat", Link()),
        pytest.param("cone", "cone", DELAYED, marks=needs_delays),
        pytest.param("reject", "reject", DELAYED, marks=needs_delays),
    ],
)
def test_cones_are_punched(
    internet: Internet, public: Host, nat: Nat, other_nat: Nat, link: Link
) -> None:
    one, other = (internet.household(Home(kind, link=link)) for kind in (nat, other_nat))
    # Where a SYN is answered by a reset, the other's has to leave in time: on a busy machine too.
    wait_until(lambda: is_punched(one, other, public))
    assert one.router.num_accepted == other.router.num_accepted == 0


@pytest.mark.parametrize(
    ("nat", "other_nat"),
    [("cone", "symmetric"), ("symmetric", "symmetric"), ("cone", "cgnat-symmetric")],
)
def test_a_symmetric_nat_is_not_punched(
    internet: Internet, public: Host, nat: Nat, other_nat: Nat
) -> None:
    one, other = (internet.household(Home(kind)) for kind in (nat, other_nat))
    with ExitStack() as stack:
        ends = punch(one, other, public, stack)
        wait_until(lambda: outermost(one) > 0 and outermost(other) > 0)
        assert not any(is_decided(end) for end in ends)


@pytest.mark.parametrize(
    ("nat", "error"), [("cone", errno.ETIMEDOUT), ("reject", errno.ECONNRESET)]
)
def test_a_router_that_forgets_breaks_a_connection_and_lets_new_ones_pass(
    internet: Internet, public: Host, nat: Nat, error: int
) -> None:
    household = internet.household(Home(nat))
    dialled, accepted = connected(household.machines[0], public)
    with dialled, accepted:
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
        household.router.flush_connections()
        dialled.sendall(b"word")
        with pytest.raises(OSError) as caught:  # noqa: PT011 its number tells which
            dialled.recv(1)
        assert caught.value.errno == error
    seen(household.machines[0], public)


@needs_ipv6
@pytest.mark.parametrize("nat", ["cone", "cgnat"])
def test_an_ipv6_address_stays_where_the_other_changes(internet: Internet, nat: Nat) -> None:
    public = internet.household(Home("open", ipv6=True)).machines[0]
    household = internet.household(Home(nat, ipv6=True))
    (household.carrier or household.router).change_address()
    with (
        listener(public, PORT, socket.AF_INET6) as server,
        dialler(household.machines[0], (public.ipv6, PORT)),
        closing(server.accept()[0]) as accepted,
    ):
        assert accepted.getpeername()[0] == household.machines[0].ipv6


@pytest.mark.parametrize("nat", ["open", "cone", "cgnat"])
def test_an_address_changes_and_connections_do_not_move(
    internet: Internet, public: Host, nat: Nat
) -> None:
    household = internet.household(Home(nat))
    before = household.address
    dialled, accepted = connected(household.machines[0], public)
    (household.carrier or household.router).change_address()
    with dialled, accepted:
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
        dialled.sendall(b"word")
        with pytest.raises(OSError):  # noqa: PT011 which depends on who misses the address first
            dialled.recv(1)
    after, _ = seen(household.machines[0], public)
    assert after == household.address != before


@pytest.mark.parametrize("nat", ["open", "cone"])
def test_a_link_that_is_down_for_a_moment_delays_what_is_sent(
    internet: Internet, public: Host, nat: Nat
) -> None:
    household = internet.household(Home(nat))
    dialled, accepted = connected(household.machines[0], public)
    with dialled, accepted:
        household.router.disconnect()
        dialled.sendall(b"word")
        accepted.settimeout(0.3)
        with pytest.raises(TimeoutError):
            accepted.recv(4)
        household.router.reconnect()
        accepted.settimeout(TIMEOUT_S)
        assert accepted.recv(4) == b"word"


def test_a_capture_has_what_crosses_the_router_as_the_internet_sees_it(
    internet: Internet, public: Host
) -> None:
    household = internet.household(Home(num_machines=2))
    machine, neighbour = household.machines
    with household.router.capture() as captured:
        dialled, accepted = connected(machine, public)
        with dialled, accepted:
            dialled.sendall(b"a word that leaves")
            accepted.sendall(b"a word that comes")
            assert dialled.recv(100) == b"a word that comes"
        dialled, accepted = connected(machine, neighbour)
        with dialled, accepted:
            dialled.sendall(b"a word at home")
            assert accepted.recv(100) == b"a word at home"
    assert captured.num_missed == 0
    assert captured.saw(b"a word that leaves")
    assert captured.saw(b"a word that comes")
    assert captured.saw(socket.inet_aton(household.address))
    assert not captured.saw(b"a word at home")
    assert not captured.saw(socket.inet_aton(machine.address))


def test_what_is_private_is_not_reached_from_outside(internet: Internet, public: Host) -> None:
    machine, before = internet.household(Home()).machines[0], internet.num_private
    with listener(machine, PORT), dialler(public, (machine.address, PORT)) as comes:
        wait_until(lambda: internet.num_private > before)
        assert not is_decided(comes)


@needs_ipv6
@pytest.mark.parametrize("nat", ["cone", "cgnat"])
def test_ipv6_has_no_nat_and_nobody_gets_in_unasked(internet: Internet, nat: Nat) -> None:
    public = internet.household(Home("open", ipv6=True)).machines[0]
    household = internet.household(Home(nat, ipv6=True, forwarded=(PORT,)))
    machine = household.machines[0]
    with (
        listener(public, PORT, socket.AF_INET6) as server,
        dialler(machine, (public.ipv6, PORT)),
        closing(server.accept()[0]) as accepted,
    ):
        assert accepted.getpeername()[0] == machine.ipv6
    with (
        listener(machine, PORT, socket.AF_INET6),
        dialler(public, (machine.ipv6, PORT)) as comes,
    ):
        wait_until(lambda: household.router.num_refused > 0)
        assert not is_decided(comes)
    assert household.router.num_accepted == 0


@needs_ipv6
def test_a_firewall_that_rejects_resets_over_ipv6_too(internet: Internet) -> None:
    public = internet.household(Home("open", ipv6=True)).machines[0]
    machine = internet.household(Home("reject", ipv6=True)).machines[0]
    with dialler(public, (machine.ipv6, PORT)) as comes:
        assert outcome(comes) == errno.ECONNREFUSED


@needs_ipv6
def test_firewalls_of_ipv6_are_punched(internet: Internet) -> None:
    one, other = (internet.household(Home("symmetric", ipv6=True)) for _ in range(2))
    machines = one.machines[0], other.machines[0]
    with (
        dialler(machines[0], (machines[1].ipv6, PORT), PORT) as dialled,
        dialler(machines[1], (machines[0].ipv6, PORT), PORT) as answering,
    ):
        assert outcome(dialled) == outcome(answering) == 0


def map_port(router: str, port: int) -> Address:
    """Request a TCP port by NAT-PMP (RFC 6886) and return its address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(TIMEOUT_S)
        asker.connect((router, 5351))
        asker.send(bytes(2))
        address = socket.inet_ntoa(asker.recv(64)[8:12])
        asker.send(struct.pack(">BBHHHL", 0, 2, 0, port, port, 600))
        (outer_port,) = struct.unpack_from(">H", asker.recv(64), 10)
    return address, outer_port


@needing(Home(maps_ports=True))
def test_a_port_that_the_router_mapped_is_reached(internet: Internet, public: Host) -> None:
    household = internet.household(Home(maps_ports=True))
    machine = household.machines[0]
    at = machine.call(map_port, "192.168.1.1", PORT)
    assert at[0] == household.address
    with (
        listener(machine, PORT) as server,
        dialler(public, at) as dialled,
        closing(server.accept()[0]),
    ):
        assert outcome(dialled) == 0
    assert household.router.num_accepted > 0


@needs_delays
def test_a_home_has_the_rate_and_the_delay_of_its_link(internet: Internet) -> None:
    far = internet.household(Home("open", link=DELAYED)).machines[0]
    machine = internet.household(Home(link=Link(8.0, 30.0, delay_ms=20.0))).machines[0]
    path = measure(machine, far, seconds=1.0)
    assert 4.0 < path.mbps <= 8.0
    assert path.round_trip_ms >= 40.0


def pids_on(machine: Host) -> list[str]:
    return run("ip", "netns", "pids", machine.namespace).split()


async def test_a_process_runs_on_a_machine_and_takes_along_what_it_started(
    internet: Internet,
) -> None:
    machine = internet.household(Home()).machines[0]
    async with machine.process("sh", "-c", "hostname -I; sleep 600 & echo; wait") as process:
        assert process.stdout is not None
        assert (await process.stdout.readline()).split() == [machine.address.encode()]
        await process.stdout.readline()
        assert len(pids_on(machine)) == 2
    wait_until(lambda: not pids_on(machine))


def test_a_function_that_fails_on_a_machine_fails_here(internet: Internet, public: Host) -> None:
    with pytest.raises(ConnectionRefusedError):
        public.call(socket.create_connection, (public.address, 1))


def homes_of(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"homes{pid}-")]


def test_an_internet_that_fails_leaves_nothing_behind() -> None:
    before = homes_of(os.getpid())

    def fail() -> None:
        with Internet() as internet:
            internet.household(Home("cgnat"))
            assert len(homes_of(os.getpid())) > len(before)
            internet.household(Home(forwarded=(-1,)))

    with pytest.raises(OSError, match="nft"):
        fail()
    assert homes_of(os.getpid()) == before


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has none
from benchmarks.lab import Link
from benchmarks.lab.homes import Home, Internet
with Internet() as internet:
    machine = internet.household(Home(link=Link(delay_ms=2.0))).machines[0]
    with machine.running("http.server"):
        print("ready", flush=True)
        sys.stdin.read()
"""


@needs_delays
def test_an_internet_that_is_interrupted_leaves_nothing_behind() -> None:
    command = (sys.executable, "-c", INTERRUPTED)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert homes_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == -signal.SIGINT
    assert homes_of(process.pid) == []


def test_what_is_missing_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "nft" else tool)
    assert why_not() == "there is no nft: apt-get install nftables"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "network namespaces need root on Linux"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Home(num_machines=0),
        lambda: Home("open", num_machines=2),
        lambda: Home("open", forwarded=(PORT,)),
        lambda: Home("open", maps_ports=True),
    ],
)
def test_a_home_that_cannot_be_is_refused(make: Callable[[], Home]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()
