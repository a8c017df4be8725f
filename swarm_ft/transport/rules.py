"""Permission to call each method: one table, by the role in the caller's certificate. Pure.

Handlers receive the caller, and check which run or attempt it may refer to.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from swarm_ft.errors import NotAllowed
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.transport import methods
from swarm_ft.transport.base import Method

RULES: dict[str, frozenset[Role]] = {
    methods.ENROL.path: frozenset({Role.NEWCOMER, Role.PEER, Role.CLIENT, Role.RELAY}),
    methods.JOIN.path: frozenset({Role.PEER}),
    methods.SUBMIT.path: frozenset({Role.CLIENT}),
    methods.WATCH.path: frozenset({Role.CLIENT}),
    methods.CANCEL.path: frozenset({Role.CLIENT}),
    methods.COLLECTED.path: frozenset({Role.CLIENT}),
    methods.STATUS.path: frozenset({Role.PEER, Role.CLIENT}),
    methods.EVENTS.path: frozenset({Role.PEER, Role.CLIENT}),
    methods.INTRODUCE.path: frozenset({Role.PEER, Role.CLIENT}),
    methods.PLACE.path: frozenset({Role.CLIENT}),
    methods.MEASURE_LINK.path: frozenset({Role.NEWCOMER, Role.PEER}),
    methods.RELAY.path: frozenset({Role.RELAY}),
    methods.LINK.path: frozenset({Role.PEER}),
    methods.GENERATE.path: frozenset({Role.CLIENT}),
    methods.LIST_CHUNKS.path: frozenset({Role.PEER, Role.CLIENT}),
    methods.FETCH_CHUNKS.path: frozenset({Role.PEER, Role.CLIENT}),
}
"""Roles that may call each path; nobody may call a path that is not in the table."""


def check_rule(method: Method[Any, Any], caller: Caller | None) -> None:
    """Refuse a caller whose role may not call a method.

    Args:
        method: Method of the call.
        caller: Caller by its certificate; None if links are not encrypted.

    Raises:
        NotAllowed: The caller's role may not; the message names the roles that may.
    """
    allowed = RULES.get(method.path, frozenset())
    if caller is not None and caller.role not in allowed:
        roles = " or ".join(sorted(allowed)) or "nobody"
        raise NotAllowed(f"{method}: expected a call by a {roles}, got one by {caller}")


def check_name(caller: Caller | None, claimed: str) -> None:
    """Refuse a peer that claims another name than its certificate's.

    Raises:
        NotAllowed: The two names differ.
    """
    if caller is not None and caller.name != claimed:
        raise NotAllowed(f"{caller} claims to be {claimed[:80]}: expected its key's name")


def is_owner(caller: Caller | None, owner: str) -> bool:
    """Whether a caller is the owner of something; every caller is in a swarm without keys."""
    return caller is None or caller.name == owner


def may_read(caller: Caller | None, owner: str, readers: Collection[str]) -> bool:
    """Whether a caller may read something: its owner may, and the readers that the owner named."""
    return is_owner(caller, owner) or (caller is not None and caller.name in readers)
