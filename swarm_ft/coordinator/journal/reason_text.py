"""Reasons as JSON, as the journal stores them: the kind and the fields that are not empty. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.events import Actor
from swarm_ft.protocol.spec.layers import LayerRange


def text_of(reason: Reason | None) -> str:
    """Return a reason as JSON; empty for None."""
    return "" if reason is None else json.dumps(_plain(reason), separators=(",", ":"))


def reason_from(text: str) -> Reason | None:
    """Return the reason that `text_of` wrote.

    Raises:
        ValueError, TypeError: The text is no reason.
    """
    return _built(json.loads(text)) if text else None


def recorded(text: str) -> Reason | None:
    """Return the reason for a text of a journal of version 8; only the run's own readers see it."""
    return Reason(kind=ReasonKind.RECORDED_TEXT, text=text) if text else None


def _plain(reason: Reason) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": reason.kind.value}
    for field in fields(Reason)[1:]:
        value = getattr(reason, field.name)
        if field.name == "layers":
            value = [[layers.start, layers.stop] for layers in value]
        elif field.name == "parts":
            value = [_plain(part) for part in value]
        elif isinstance(value, Contribution):
            value = asdict(value)
        if value not in (None, "", (), []):
            found[field.name] = value
    return found


def _built(found: Mapping[str, Any]) -> Reason:
    named = dict(found)
    run_id, actor = named.pop("run_id", None), named.pop("actor", None)
    contribution = named.pop("given", None)
    return Reason(
        kind=ReasonKind(named.pop("kind")),
        run_id=None if run_id is None else RunId(run_id),
        runs=tuple(map(RunId, named.pop("runs", ()))),
        peers=tuple(map(PeerId, named.pop("peers", ()))),
        others=tuple(map(PeerId, named.pop("others", ()))),
        layers=tuple(LayerRange(start, stop) for start, stop in named.pop("layers", ())),
        parts=tuple(map(_built, named.pop("parts", ()))),
        actor=None if actor is None else Actor(actor),
        given=None if contribution is None else Contribution(**contribution),
        **named,
    )
