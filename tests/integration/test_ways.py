"""The way from each kind of home to each other: real routers, in network namespaces.

`--junitxml FILE` has, of each pair, the way and how long it took.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import pytest

from benchmarks.lab.homes import Home, Internet, Nat, why_not
from benchmarks.lab.host import Host, exchange
from benchmarks.lab.hub import Link
from benchmarks.lab.router import Router
from swarm_ft.identity.certificates import key_name, to_pem
from swarm_ft.identity.roles import Role
from tests.members import Swarm, make_swarm

DELAYED = Link(delay_ms=20.0)
"""Resets of unasked SYNs end a punch unless the SYNs cross on their way, as they do in life."""
FARTHER = Link(delay_ms=40.0)
"""Of routers that reset: theirs cross even if a busy machine keeps a process waiting."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not(Home(link=DELAYED))), reason=why_not(Home(link=DELAYED))),
]

KINDS: tuple[Nat, ...] = ("open", "cone", "reject", "cgnat", "symmetric", "cgnat-symmetric")


@dataclass
class Resident:
    """A member at home, and its router."""

    name: str
    process: Popen[str]
    router: Router


@dataclass
class World:
    """A hub, and two homes of each kind."""

    residents: dict[tuple[Nat, int], Resident]

    def way(self, one: tuple[Nat, int], other: tuple[Nat, int]) -> tuple[str, float]:
        """Return how one member reaches another, and after how many seconds."""
        answer = json.loads(exchange(self.residents[one].process, self.residents[other].name))
        return answer["way"], answer["took_s"]


def write_keys(swarm: Swarm, folder: Path) -> dict[tuple[Nat, int], str]:
    """Everybody's, by the files' names; what they are called, by their homes."""
    (folder / "authority.pem").write_bytes(to_pem(swarm.authority))
    names: dict[tuple[Nat, int], str] = {}
    for home in [None, *((kind, number) for kind in KINDS for number in range(2))]:
        credentials = swarm.coordinator() if home is None else swarm.member(Role.PEER)
        name = "coordinator" if home is None else key_name(credentials.certificate)
        (folder / f"{name}.pem").write_bytes(to_pem(credentials.certificate))
        (folder / f"{name}.key").write_bytes(credentials.key_pem)
        if home is not None:
            names[home] = name
    return names


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("keys")
    names = write_keys(make_swarm(), folder)
    with ExitStack() as stack:
        internet = stack.enter_context(Internet())
        public = internet.household(Home("open", link=DELAYED)).machines[0]
        hub = stack.enter_context(at(public, "hub", folder, public.address))
        endpoint = exchange(hub)
        residents = {}
        for (kind, number), name in names.items():
            link = FARTHER if kind == "reject" else DELAYED
            house = internet.household(Home(kind, link=link))
            machine = house.machines[0]
            process = stack.enter_context(
                at(machine, "member", folder, name, endpoint, machine.address)
            )
            residents[kind, number] = Resident(name, process, house.router)
        for resident in residents.values():
            assert exchange(resident.process) == resident.name
        yield World(residents)


def at(
    machine: Host, role: str, folder: Path, *arguments: str
) -> AbstractContextManager[Popen[str]]:
    return machine.running("tests.meeting_end", role, str(folder), *arguments)


def expected(one: Nat, other: Nat) -> set[str]:
    symmetric = {"symmetric", "cgnat-symmetric"}
    if "open" in (one, other):
        return {way for way, kind in (("direct", other), ("reverse", one)) if kind == "open"}
    return {"relayed" if symmetric & {one, other} else "punched"}


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("one", KINDS)
def test_the_way_from_home_to_home(
    world: World, one: Nat, other: Nat, record_property: Callable[[str, object], None]
) -> None:
    way, took_s = world.way((one, 0), (other, 1))
    record_property(way, took_s)
    assert way in expected(one, other), f"after {took_s:.2f} s"


@pytest.mark.parametrize(
    ("kind", "verdict", "cause"),
    [
        ("open", "ok", ""),
        ("cone", "ok", "router"),
        ("reject", "ok", "router"),
        ("cgnat", "ok", "router"),
        ("symmetric", "note", "symmetric-router"),
    ],
)
def test_everybody_is_told_how_others_reach_it(
    world: World, kind: Nat, verdict: str, cause: str
) -> None:
    answer = json.loads(exchange(world.residents[kind, 0].process, "?"))
    assert (answer["verdict"], answer["cause"]) == (verdict, cause)


def test_without_a_relay_whoever_nobody_reaches_is_told_why(tmp_path: Path) -> None:
    names = write_keys(make_swarm(), tmp_path)
    with ExitStack() as stack:
        internet = stack.enter_context(Internet())
        public = internet.household(Home("open")).machines[0]
        endpoint = exchange(stack.enter_context(at(public, "bare", tmp_path, public.address)))
        answers = {}
        for kind in ("open", "cone"):
            machine = internet.household(Home(kind)).machines[0]
            process = stack.enter_context(
                at(machine, "member", tmp_path, names[kind, 0], endpoint, machine.address)
            )
            assert exchange(process) == names[kind, 0]
            answers[kind] = json.loads(exchange(process, "?"))
    assert (answers["open"]["verdict"], answers["open"]["cause"]) == ("ok", "")
    assert (answers["cone"]["verdict"], answers["cone"]["cause"]) == ("bad", "router")
    assert "no relay" in answers["cone"]["text"]


def test_no_router_let_anybody_in_unasked(world: World) -> None:
    world.way(("cone", 0), ("reject", 1))
    routers = {home: one.router for home, one in world.residents.items() if home[0] != "open"}
    assert {home: router.num_accepted for home, router in routers.items()} == dict.fromkeys(
        routers, 0
    )


def way_between(tmp_path: Path, one: Host, other: Host, public: Host, *, ipv6: bool) -> str:
    """Return how a member on one machine reaches one on another, with a hub in public."""
    names = list(write_keys(make_swarm(), tmp_path).values())
    with ExitStack() as stack:
        endpoint = exchange(stack.enter_context(at(public, "hub", tmp_path, address(public, ipv6))))
        processes = []
        for name, machine in zip(names, (one, other), strict=False):
            where = ("member", tmp_path, name, endpoint, address(machine, ipv6))
            processes.append(stack.enter_context(at(machine, *where)))
        assert [exchange(process) for process in processes] == names[:2]
        return str(json.loads(exchange(processes[0], names[1]))["way"])


def address(machine: Host, ipv6: bool) -> str:
    return machine.ipv6 if ipv6 else machine.address


def test_two_machines_of_one_house_dial_each_other(tmp_path: Path) -> None:
    with Internet() as internet:
        public = internet.household(Home("open", link=DELAYED)).machines[0]
        house = internet.household(Home("symmetric", num_machines=2, link=DELAYED))
        one, other = house.machines
        way = way_between(tmp_path, one, other, public, ipv6=False)
        assert way in {"direct", "reverse"}  # both dial, and either may be first


@pytest.mark.skipif(bool(why_not(Home(ipv6=True))), reason=why_not(Home(ipv6=True)))
def test_two_homes_with_ipv6_punch_whatever_their_routers_do_with_ports(tmp_path: Path) -> None:
    with Internet() as internet:
        public = internet.household(Home("open", ipv6=True, link=DELAYED)).machines[0]
        one, other = (
            internet.household(Home("symmetric", ipv6=True, link=DELAYED)).machines[0]
            for _ in range(2)
        )
        assert way_between(tmp_path, one, other, public, ipv6=True) == "punched"


@pytest.mark.skipif(bool(why_not(Home(maps_ports=True))), reason=why_not(Home(maps_ports=True)))
def test_a_router_that_maps_ports_makes_a_home_public(tmp_path: Path) -> None:
    names = write_keys(make_swarm(), tmp_path)
    one, other = names["symmetric", 0], names["symmetric", 1]
    with ExitStack() as stack:
        internet = stack.enter_context(Internet())
        public = internet.household(Home("open")).machines[0]
        endpoint = exchange(stack.enter_context(at(public, "hub", tmp_path, public.address)))
        processes = []
        for role, name, home in (
            ("member", one, Home("symmetric")),
            ("mapped", other, Home("symmetric", maps_ports=True)),
        ):
            machine = internet.household(home).machines[0]
            process = at(machine, role, tmp_path, name, endpoint, machine.address)
            processes.append(stack.enter_context(process))
            assert exchange(processes[-1]) == name
        assert json.loads(exchange(processes[0], other))["way"] == "direct"
