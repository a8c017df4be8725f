"""Values of earlier recordings, as JSON in today's fields. Pure.

Version 1 had text in place of reasons. Versions before 4 lacked peers' machines, so the memory of
peers on one machine is not bounded there. Fields that an earlier version lacked have their
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swarm_ft.coordinator.facts.events import RunCancelled, SnapshotLost, TokensLost
from swarm_ft.coordinator.facts.messages import Progress
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.protocol.messages.events import Actor

Fields = dict[str, Any]

_OPERATOR_1 = "the swarm's owner"
"""Text of version 1 for the operator."""


def _renamed(old: str, new: str) -> Callable[[Fields], Fields]:
    return lambda found: {new if name == old else name: one for name, one in found.items()}


def _with_actor(found: Fields) -> Fields:
    """Replace `by` of version 1 and `by_operator` of version 2."""
    is_by_operator = found.get("by") == _OPERATOR_1 or found.get("by_operator", False)
    return {"actor": Actor.OPERATOR} | found if is_by_operator else found


def _with_kind(found: str | Fields) -> Fields | None:
    """Replace text; only the run's own readers may see it. Empty text is no reason."""
    if not isinstance(found, str):
        return found
    return {"kind": ReasonKind.RECORDED_TEXT, "text": found} if found else None


UPGRADES: Mapping[type, Callable[[Any], Fields | None]] = {
    Reason: _with_kind,
    Progress: _renamed("words", "reason"),
    RunCancelled: _with_actor,
    SnapshotLost: _renamed("reason", "message"),
    TokensLost: _renamed("reason", "message"),
}
"""Functions from a record's JSON of any version to today's fields, by class."""
