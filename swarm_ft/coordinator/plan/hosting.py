"""What a peer may host of a run: what its invitation grants, and whom the job trusts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm_ft.coordinator.facts.state import Member
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec

NOT_ALONE = "may not host a stage alone"
MAX_NAMED = 3
"""Peers that a reason names; more would say no more."""


def refusal(spec: RunSpec, member: Member, layers: LayerRange) -> str:
    """Why a peer may not host these blocks of a run beside others; empty if it may."""
    if not member.grant.covers(layers):
        return f"may host layers {member.grant.layers} only"
    is_end = layers.start == 0 or layers.stop == spec.model.num_blocks
    return end_refusal(spec, member) if is_end else ""


def end_refusal(spec: RunSpec, member: Member) -> str:
    """Why a peer may not get text and labels of a run, as its ends do; empty if it may."""
    trusted = spec.trusted_with_ends
    if not member.grant.sees_tokens:
        return "may not see tokens"
    if trusted and member.hello.peer_id not in trusted:
        return "is none of the job's --private-ends"
    return ""


def kept_out(spec: RunSpec, members: Iterable[Member], missing: Sequence[LayerRange]) -> str:
    """Who is there, and may not host a part of what is missing, and why; empty if nobody is."""
    named = ((m.hello.peer_id, _why_not(spec, m, missing)) for m in members)
    words = [f"peer {peer} {why}" for peer, why in named if why]
    if len(words) > MAX_NAMED:
        words[MAX_NAMED:] = [f"nor may {len(words) - MAX_NAMED} others"]
    return ", ".join(words)


def _why_not(spec: RunSpec, member: Member, missing: Sequence[LayerRange]) -> str:
    """Of the blocks that it would host: those that it names, or what is missing."""
    own = member.hello.layers
    for gap in missing:
        if own is not None and not (own.start < gap.stop and gap.start < own.stop):
            continue
        why = refusal(spec, member, own or gap)
        if why or member.grant.replica_only:
            return why or NOT_ALONE
    return ""
