"""Who may call what: one table, by the role in the caller's certificate. Pure.

What a caller may ask about (its own run, its own attempt) is for the handlers to check; they are
told who calls.
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
"""What is not in it, nobody may call."""


def check_rule(method: Method[Any, Any], caller: Caller | None) -> None:
    """Refuse callers whose role may not call a method.

    Args:
        method: that is called.
        caller: by whom; None where links are not encrypted, and nobody is known.

    Raises:
        NotAllowed: says who may.
    """
    allowed = RULES.get(method.path, frozenset())
    if caller is not None and caller.role not in allowed:
        roles = " or ".join(sorted(allowed)) or "nobody"
        raise NotAllowed(f"{method}: expected a call by a {roles}, got one by {caller}")


def check_name(caller: Caller | None, claimed: str) -> None:
    """Refuse a peer that says it is another than its certificate says.

    Raises:
        NotAllowed: the two differ.
    """
    if caller is not None and caller.name != claimed:
        raise NotAllowed(f"{caller} says that it is {claimed[:80]}: a peer's name is its key's")


def is_owner(caller: Caller | None, owner: str) -> bool:
    """Whether a caller may do as it likes with what has this owner."""
    return caller is None or caller.name == owner


def may_read(caller: Caller | None, owner: str, readers: Collection[str]) -> bool:
    """Whether a caller may see all of what has this owner, who named these readers."""
    return is_owner(caller, owner) or (caller is not None and caller.name in readers)
