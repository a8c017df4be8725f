"""Values in the journal's columns of JSON, and those of the table `run_values`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Repartition, Run, Steering
from swarm_ft.coordinator.values import Serialiser, default_of
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import Claim

STORED = Serialiser(left_out={"endpoint"}, is_sparse=True, lists={LayerRange})
"""Serialiser of the journal. Endpoints are void after a restart."""
RUN_VALUES: Mapping[str, Any] = MappingProxyType(
    {"priority": int, "claim": Claim, "steering": Steering, "moving": Repartition}
)
"""Fields of a run with their types that `run_values` has, where they differ from the default."""
_DEFAULTS = {field.name: default_of(field) for field in fields(Run) if field.name in RUN_VALUES}


def text_of(value: Any) -> str:  # noqa: ANN401 - values of all types
    """Return a value as JSON."""
    return json.dumps(STORED.encode(value), separators=(",", ":"))


def value_of(hint: Any, text: str) -> Any:  # noqa: ANN401
    """Return the value of this type that `text_of` wrote.

    Raises:
        ValueError, TypeError, LookupError, SwarmError: The text is no such value.
    """
    return STORED.decode(hint, json.loads(text))


def run_values_of(run: Run) -> list[tuple[str, str, str]]:
    """Return a run's rows of `run_values`."""
    found = ((name, getattr(run, name)) for name in RUN_VALUES)
    return [(run.run_id, name, text_of(one)) for name, one in found if one != _DEFAULTS[name]]


def text_of_reason(reason: Reason | None) -> str:
    """Return a reason as JSON; empty for None."""
    return "" if reason is None else text_of(reason)


def reason_of(text: str) -> Reason | None:
    """Return the reason that `text_of_reason` wrote.

    Raises:
        ValueError, TypeError, LookupError, SwarmError: The text is no reason.
    """
    found: Reason | None = value_of(Reason, text) if text else None
    return found


def recorded(text: str) -> Reason | None:
    """Return the reason for a text of a journal of version 8; only the run's own readers see it."""
    return Reason(kind=ReasonKind.RECORDED_TEXT, text=text) if text else None
