"""Which peer hosts which blocks, and why nobody does yet. Pure.

Peers that name their layers keep them; peers that leave the choice (`--layers auto`) share what
is left, as evenly as their memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from swarm_ft.coordinator.state import Member
from swarm_ft.protocol.layers import LayerRange, split_evenly
from swarm_ft.protocol.messages import StageAssignment
from swarm_ft.protocol.run_spec import ModelSpec

SETTLE_S = 2.0
"""How long automatic peers are gathered after the last one came, before the first assignment."""
MEMORY_PER_WEIGHT = 4
"""Weights, gradients and AdamW's two moments, each as large as the weights."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages, first to last; or none, and the reason."""

    stages: tuple[StageAssignment, ...]
    reason: str


def place(model: ModelSpec, members: Sequence[Member], now_s: float) -> Placement:
    """Cover all blocks of the model with members, or say what is missing."""
    fixed = [m for m in members if m.hello.layers and m.hello.layers.stop <= model.num_blocks]
    free = [m for m in members if m.hello.layers is None]
    parts = _cover(model.num_blocks, fixed)
    gaps = [part for part in parts if isinstance(part, LayerRange)]
    if not gaps:
        return Placement(tuple(_stage(part) for part in parts if isinstance(part, Member)), "")
    if not free:
        return Placement((), f"waiting for layers {_listed(gaps)}")
    if now_s - max(m.joined_at_s for m in free) < SETTLE_S:
        return Placement((), "gathering peers")
    return _fill(model, parts, gaps, free)


def _cover(num_blocks: int, fixed: Sequence[Member]) -> tuple[Member | LayerRange, ...]:
    """Members and gaps, in order, that tile the blocks with the smallest gaps."""

    @cache
    def best(start: int) -> tuple[int, int, tuple[Member | LayerRange, ...]]:
        if start == num_blocks:
            return 0, 0, ()
        options = []
        for index, member in enumerate(fixed):
            if member.hello.layers and member.hello.layers.start == start:
                gap, count, rest = best(member.hello.layers.stop)
                options.append((gap, count + 1, index, (member, *rest)))
        starts = {m.hello.layers.start for m in fixed if m.hello.layers}
        for stop in sorted({s for s in starts if s > start} | {num_blocks}):
            gap, count, rest = best(stop)
            if not (rest and isinstance(rest[0], LayerRange)):
                whole = (LayerRange(start, stop), *rest)
                options.append((gap + stop - start, count + 1, len(fixed), whole))
        gap, count, _, parts = min(options, key=lambda option: option[:3])
        return gap, count, parts

    return best(0)[2]


def _fill(
    model: ModelSpec,
    parts: Sequence[Member | LayerRange],
    gaps: Sequence[LayerRange],
    free: Sequence[Member],
) -> Placement:
    shares = _shares(gaps, len(free))
    if shares is None:
        return Placement((), f"waiting for peers: {len(gaps)} gaps, {len(free)} peers to fill them")
    by_memory = sorted(free, key=lambda m: (-m.hello.memory_bytes, m.joined_at_s))
    ranges = [r for gap in gaps for r in split_evenly(gap, shares[gap])]
    for layers, member in zip(sorted(ranges, key=len, reverse=True), by_memory, strict=False):
        needed = len(layers) * model.block_bytes * MEMORY_PER_WEIGHT
        if needed > member.hello.memory_bytes:
            return Placement(
                (), f"waiting for more peers: layers {layers} fit into nobody's memory"
            )
    hosts = dict(zip(sorted(ranges, key=len, reverse=True), by_memory, strict=False))
    stages = []
    for part in parts:
        if isinstance(part, Member):
            stages.append(_stage(part))
        else:
            inside = [r for r in ranges if part.start <= r.start < part.stop]
            stages += [StageAssignment(peer_id=hosts[r].hello.peer_id, layers=r) for r in inside]
    return Placement(tuple(stages), "")


def _shares(gaps: Sequence[LayerRange], num_peers: int) -> dict[LayerRange, int] | None:
    """How many peers share each gap: one each, then wherever the parts are longest."""
    if num_peers < len(gaps):
        return None
    shares = dict.fromkeys(gaps, 1)
    for _ in range(num_peers - len(gaps)):
        longest = max(gaps, key=lambda gap: len(gap) / shares[gap])
        if shares[longest] == len(longest):
            break
        shares[longest] += 1
    return shares


def _stage(member: Member) -> StageAssignment:
    layers = member.hello.layers
    if layers is None:
        raise ValueError("a member without layers covers nothing")
    return StageAssignment(peer_id=member.hello.peer_id, layers=layers)


def _listed(gaps: Sequence[LayerRange]) -> str:
    return ", ".join(str(gap) for gap in gaps)
