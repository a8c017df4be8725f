"""The swarm without one of its rules, one at a time: some cell has to go red for each.

Rules are taken away in the swarm that runs, where they are looked up at each call. What the suite
expects is written down apart from them, in `table` and `attacks`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest.mock import patch

from swarm_ft.coordinator import service, submission, watching
from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.errors import RunFailed
from swarm_ft.identity.certificates import caller_of, from_pem
from swarm_ft.identity.keys import name_of
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.net import transfer
from swarm_ft.peer import links, node
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.rules import RULES
from tests.hostile import suite
from tests.hostile.cells import Outcome
from tests.hostile.scene import Scene
from tests.hostile.suite import Change

TRIES = 3
"""Swarms that a change may break before its cells are reached."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A rule that is gone.

    Attributes:
        cells: patterns of those that may notice.
    """

    name: str
    change: Change
    cells: tuple[str, ...]


def _rule(path: str, roles: Collection[Role]) -> Change:
    return lambda: patch.dict(RULES, {path: frozenset(roles)})


def _patched(*places: tuple[object, str, object]) -> Change:
    @contextmanager
    def changed() -> Iterator[None]:
        with ExitStack() as stack:
            for place, name, value in places:
                stack.enter_context(patch.object(place, name, value))
            yield

    return changed


def _of_rules() -> Iterator[Mutation]:
    for path, roles in RULES.items():
        method = path.rpartition("/")[2]
        cells = (f"{method}:*",)
        yield Mutation(f"{method}: everybody may", _rule(path, list(Role)), cells)
        for role in sorted(roles):
            yield Mutation(f"{method}: no {role} may", _rule(path, roles - {role}), cells)


def _anybody(*_: object) -> bool:
    return True


def _nothing(*_: object) -> None:
    return None


def _found(_caller: object, name: object, offers: Mapping[Any, Any]) -> Any:
    return offers[name]


def _unrevoked(self: Credentials, context: Mapping[str, Collection[bytes]]) -> Caller:
    return caller_of(from_pem(next(iter(context["x509_pem_cert"]))), self.authority)


def _admitted(_: Registry, caller: Caller, _now: object) -> Caller:
    return Caller(role=Role.PEER, name=name_of(caller.key), key=caller.key)


OTHERS = (
    Mutation(
        "a peer may say that it is another",
        _patched((service, "check_name", _nothing), (links, "check_name", _nothing)),
        ("04-*",),
    ),
    Mutation(
        "a run is everybody's",
        _patched((service, "is_owner", _anybody), (service, "may_read", _anybody)),
        ("Watch:client", "Cancel:client", "Collected:client"),
    ),
    Mutation("everybody sees details", _patched((watching, "may_read", _anybody)), ("Status:*",)),
    Mutation(
        "a job that comes again may be another's",
        _patched((submission, "_is_same", _anybody)),
        ("Submit:client",),
    ),
    Mutation(
        "files are for everybody",
        _patched((transfer, "offered_to", _found)),
        ("ListChunks:*", "FetchChunks:*"),
    ),
    Mutation(
        "trained stages speak to everybody",
        _patched((node, "offered_to", _found)),
        ("Generate:client",),
    ),
    Mutation(
        "keys are not taken back",
        _patched((Credentials, "caller", _unrevoked)),
        ("Status:revoked", "Link:revoked"),
    ),
    Mutation(
        "invitations are not counted",
        _patched((Registry, "admit", _admitted)),
        ("Enrol:late-newcomer",),
    ),
    Mutation(
        "links of members that no assignment names stand",
        _patched((links.Links, "check_named", _nothing)),
        ("10-boundary*",),
    ),
    Mutation(
        "as many of them as they like",
        _patched((links, "MAX_IDLE_LINKS", 1 << 20)),
        ("10-links*",),
    ),
)


def mutations() -> tuple[Mutation, ...]:
    """All of them."""
    return (*_of_rules(), *OTHERS)


UNCHANGED = Mutation(
    "nothing is changed",
    nullcontext,
    tuple(dict.fromkeys(pattern for one in mutations() for pattern in one.cells)),
)
"""No cell is to go red for this: the others' cells go red for what is changed, and nothing else."""


def cells_of(mutation: Mutation) -> list[str]:
    """Those that may notice."""
    return [c for c in suite.names() if any(fnmatch(c, p) for p in mutation.cells)]


async def run_mutations(work_dir: Path) -> AsyncGenerator[Outcome, None]:
    """Run each mutation; the outcome is a problem unless the suite detects it."""
    remaining, number = [UNCHANGED, *mutations()], 0
    while remaining:
        async with suite.scene_in(work_dir / f"scene-{number}") as scene:
            number += 1
            while remaining and scene.is_whole:
                yield await _outcome(scene, remaining.pop(0))
            if number > TRIES * len(mutations()):
                raise RunFailed("swarms break before anything is changed in them")


async def _outcome(scene: Scene, mutation: Mutation) -> Outcome:
    began_s = time.monotonic()
    red = await suite.first_red(scene, cells_of(mutation), mutation.change)
    is_noticed = bool(red) != (mutation is UNCHANGED)
    problem = "" if is_noticed else f"{red or 'no cell'} went red"
    seconds = time.monotonic() - began_s
    cell = f"{mutation.name} [{red}]" if red else mutation.name
    return Outcome(cell=cell, problem=problem, seconds=seconds)
