"""Permission to host a stage: from the peer's invitation, and from the job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from swarm_ft.coordinator.facts.reasons import MAX_NAMED, Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Member
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec

_NO_TOKENS = Reason(kind=ReasonKind.NO_TOKENS)
_NOT_TRUSTED = Reason(kind=ReasonKind.NOT_TRUSTED)
_NOT_ALONE = Reason(kind=ReasonKind.NOT_ALONE)


def refusal(spec: RunSpec, member: Member, layers: LayerRange) -> Reason | None:
    """Return why a peer may not host these blocks of a run beside others; None if it may."""
    granted = member.grant.layers
    if granted is not None and not member.grant.covers(layers):
        return Reason(kind=ReasonKind.GRANT_LAYERS, layers=(granted,))
    is_end = layers.start == 0 or layers.stop == spec.model.num_blocks
    return end_refusal(spec, member) if is_end else None


def end_refusal(spec: RunSpec, member: Member) -> Reason | None:
    """Return why a peer may not receive text and labels of a run, as ends do; None if it may."""
    trusted = spec.trusted_with_ends
    if not member.grant.sees_tokens:
        return _NO_TOKENS
    if trusted and member.hello.peer_id not in trusted:
        return _NOT_TRUSTED
    return None


def missing_layers(
    spec: RunSpec, members: Iterable[Member], missing: Sequence[LayerRange]
) -> Reason:
    """Return the reason for missing layers, with the peers that may not host them."""
    refused = [(m.hello.peer_id, why) for m in members if (why := _why_not(spec, m, missing))]
    return Reason(
        kind=ReasonKind.MISSING_LAYERS,
        layers=tuple(missing),
        parts=tuple(replace(why, peers=(peer,)) for peer, why in refused[:MAX_NAMED]),
        num_more=len(refused[MAX_NAMED:]),
    )


def _why_not(spec: RunSpec, member: Member, missing: Sequence[LayerRange]) -> Reason | None:
    """Return why a member may not host its own layers, or the missing ones."""
    own = member.hello.layers
    for gap in missing:
        if own is not None and not (own.start < gap.stop and gap.start < own.stop):
            continue
        why = refusal(spec, member, own or gap)
        if why or member.grant.replica_only:
            return why or _NOT_ALONE
    return None
