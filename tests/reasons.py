"""Reasons for tests to compare with, and what is in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers


def reason(kind: ReasonKind, *peers: str, layers: str = "", **fields: Any) -> Reason:
    """A reason about these peers, and layers such as `0-2, 4-6`."""
    ranges = ranges_of(layers) if layers else ()
    return Reason(kind=kind, peers=tuple(map(PeerId, peers)), layers=ranges, **fields)


def ranges_of(layers: str) -> tuple[LayerRange, ...]:
    """Ranges of layers such as `0-2, 4-6`."""
    found = [parse_layers(one) for one in layers.split(", ")]
    return tuple(one for one in found if one is not None)


def missing(layers: str, *parts: Reason, num_more: int = 0) -> Reason:
    """A run waits for these layers, which these peers may not host."""
    return reason(ReasonKind.MISSING_LAYERS, layers=layers, parts=parts, num_more=num_more)


def may_return(layers: str, seconds: int | None = None) -> Reason:
    """A run waits for the peers of these layers, which are away."""
    return reason(ReasonKind.PEER_MAY_RETURN, layers=layers, amount=seconds)


def behind(*runs: str, position: int = 0) -> Reason:
    """A run waits until these are over, and so many others have begun."""
    return reason(ReasonKind.BEHIND, runs=tuple(map(RunId, runs)), amount=position)


def all_parts(whole: Reason | None) -> Iterator[Reason]:
    """The reason and all its parts, at any depth."""
    if whole is not None:
        yield whole
        for part in whole.parts:
            yield from all_parts(part)


def kinds_in(whole: Reason | None) -> list[ReasonKind]:
    """The kinds of the reason and of all its parts."""
    return [part.kind for part in all_parts(whole)]


def part_of(whole: Reason | None, kind: ReasonKind) -> Reason:
    """The first part of this kind, at any depth; raises StopIteration if there is none."""
    return next(part for part in all_parts(whole) if part.kind is kind)
