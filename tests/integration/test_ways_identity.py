"""TLS proves a member's identity over every way: real routers, in network namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import pytest

from benchmarks.lab.homes import Home, Internet, Nat, why_not
from benchmarks.lab.host import exchange
from benchmarks.lab.hub import Link
from swarm_ft.identity.certificates import key_name, to_pem
from swarm_ft.identity.roles import Role
from swarm_ft.transport.credentials import Credentials
from tests.members import make_swarm

DELAYED = Link(delay_ms=20.0)
"""So that punches cross on their way."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not(Home(link=DELAYED))), reason=why_not(Home(link=DELAYED))),
]

WAYS: dict[str, tuple[Nat, Nat]] = {
    "direct": ("cone", "open"),
    "reverse": ("open", "cone"),
    "punched": ("cone", "cone"),
    "relayed": ("symmetric", "cone"),
}
"""Homes of the caller and of the callee."""
CALLERS: tuple[Nat, ...] = ("open", "cone", "symmetric")
CALLEES: tuple[Nat, ...] = ("open", "cone")
KINDS = ("right", "wrong", "stranger", "revoked")
"""What somebody shows: its own key's certificate, another member's, one of another swarm, or one
that is good and was revoked."""


@dataclass
class World:
    """Machines, and who is at them, by the kinds of home and of certificate."""

    callers: dict[Nat, Popen[str]]
    callees: dict[Nat, Popen[str]]
    names: dict[tuple[str, Nat, str], str]

    def call(self, way: str, caller: str, callee: str) -> tuple[dict[str, str], list[str]]:
        """Return the caller's outcome, and the callers that the callee accepted meanwhile."""
        caller_nat, callee_nat = WAYS[way]
        name = self.names["callee", callee_nat, callee]
        before = self._received(callee_nat, name)
        answer = exchange(
            self.callers[caller_nat], f"{self.names['caller', caller_nat, caller]} {name}"
        )
        return json.loads(answer), self._received(callee_nat, name)[len(before) :]

    def _received(self, nat: Nat, name: str) -> list[str]:
        calls = json.loads(exchange(self.callees[nat], "?"))
        return [caller for caller, callee in calls if callee == name]


class Keys:
    """Makes them, in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._swarm, self._others = make_swarm(), make_swarm()
        (folder / "authority.pem").write_bytes(to_pem(self._swarm.authority))
        self._write("coordinator", self._swarm.coordinator())
        self.revoked: list[str] = []

    def member(self, role: Role, kind: str) -> tuple[str, str]:
        """Its name, and that of what it shows."""
        own = self._swarm.member(role)
        name = self._write(key_name(own.certificate), own)
        if kind == "revoked":
            self.revoked.append(name)
        if kind == "wrong":
            another = self._swarm.member(role)
            return name, self._write(key_name(another.certificate), another)
        if kind == "stranger":  # who even has its name
            return name, self._write(f"{name}-stranger", self._others.member(role, name))
        return name, name

    def _write(self, file: str, credentials: Credentials) -> str:
        (self._folder / f"{file}.pem").write_bytes(to_pem(credentials.certificate))
        (self._folder / f"{file}.key").write_bytes(credentials.key_pem)
        return file


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("keys")
    keys = Keys(folder)
    groups = [("caller", Role.CLIENT, home) for home in CALLERS]
    groups += [("callee", Role.PEER, home) for home in CALLEES]
    pairs = {
        (side, home, kind): keys.member(role, kind) for side, role, home in groups for kind in KINDS
    }
    (folder / "revoked").write_text("\n".join(keys.revoked), encoding="utf-8")
    with ExitStack() as stack:
        internet = stack.enter_context(Internet())
        public = internet.household(Home("open", link=DELAYED)).machines[0]
        running = public.running("tests.meeting_end", "hub", str(folder), public.address)
        hub = exchange(stack.enter_context(running))
        processes: dict[tuple[str, Nat], Popen[str]] = {}
        for side, _, home in groups:
            machine = internet.household(Home(home, link=DELAYED)).machines[0]
            members = [":".join(pairs[side, home, kind]) for kind in KINDS]
            words = "tests.identity_end", str(folder), hub, machine.address, *members
            processes[side, home] = stack.enter_context(machine.running(*words))
        for process in processes.values():
            assert exchange(process) == "ready"
        yield World(
            {home: processes["caller", home] for home in CALLERS},
            {home: processes["callee", home] for home in CALLEES},
            {key: name for key, (name, _) in pairs.items()},
        )


@pytest.mark.parametrize("way", WAYS)
def test_who_shows_what_it_should_gets_through(world: World, way: str) -> None:
    outcome, received = world.call(way, "right", "right")
    assert outcome == {"code": "", "says": "", "way": way}
    assert received == [world.names["caller", WAYS[way][0], "right"]]


@pytest.mark.parametrize(
    ("callee", "cause"), [("wrong", "another member's"), ("stranger", "to another swarm")]
)
@pytest.mark.parametrize("way", WAYS)
def test_who_is_not_who_was_dialled_hears_nothing(
    world: World, way: str, callee: str, cause: str
) -> None:
    outcome, received = world.call(way, "right", callee)
    assert (outcome["code"], outcome["way"], received) == ("unavailable", way, [])
    assert outcome["says"].startswith(f"peer {world.names['callee', WAYS[way][1], callee]}: it ")
    assert cause in outcome["says"]


@pytest.mark.parametrize("way", WAYS)
def test_a_stranger_is_heard_by_nobody(world: World, way: str) -> None:
    outcome, received = world.call(way, "stranger", "right")
    assert (outcome["code"], outcome["way"], received) == ("unavailable", way, [])


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_is_who_its_certificate_says(world: World, way: str) -> None:
    outcome, received = world.call(way, "wrong", "right")
    (name,) = received
    assert (outcome["code"], outcome["way"]) == ("", way)
    assert name != world.names["caller", WAYS[way][0], "wrong"]


@pytest.mark.parametrize("way", WAYS)
def test_whose_key_was_revoked_is_told_so(world: World, way: str) -> None:
    outcome, received = world.call(way, "revoked", "right")
    assert (outcome["code"], outcome["way"], received) == ("not-allowed", way, [])
    assert "its key was revoked" in outcome["says"]
