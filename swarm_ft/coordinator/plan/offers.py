"""Offers of members for placement, sorted once for all runs that use the same members. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from swarm_ft.coordinator.facts.state import Member
from swarm_ft.coordinator.plan.hosting import end_refusal
from swarm_ft.ids import PeerId
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec

_UNLIMITED = Grant()


class Offers:
    """Some members, and summaries of what they lend. An instance never changes.

    Attributes:
        members: All of them, in the swarm's order.
        carriers: Members that may host a stage alone.
        autos: Carriers that leave the choice of layers to the coordinator.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = tuple(members)
        self.carriers = tuple(m for m in self.members if not m.grant.replica_only)
        self.autos = tuple(m for m in self.carriers if m.hello.layers is None)
        self._sorted_autos: dict[int, tuple[Member, ...]] = {}

    def without(self, peers: Collection[PeerId]) -> Offers:
        """Return the offers without these members."""
        if not any(peer in self._by_name for peer in peers):
            return self
        return Offers(member for name, member in self._by_name.items() if name not in peers)

    def get(self, peer_id: PeerId) -> Member | None:
        """Return the member of this name, if it is one of them."""
        return self._by_name.get(peer_id)

    @cached_property
    def _by_name(self) -> Mapping[PeerId, Member]:
        return {member.hello.peer_id: member for member in self.members}

    # ---- members that name their layers

    @cached_property
    def fixed(self) -> tuple[tuple[LayerRange, tuple[tuple[int, Member], ...]], ...]:
        """Carriers that name their layers, by these layers, each with its position."""
        found: dict[LayerRange, list[tuple[int, Member]]] = {}
        for place, member in enumerate(self.carriers):
            if member.hello.layers is not None:
                found.setdefault(member.hello.layers, []).append((place, member))
        return tuple((layers, tuple(members)) for layers, members in found.items())

    # ---- members that leave the choice

    @cached_property
    def newest_auto_s(self) -> float:
        """Monotonic seconds at which the last of the autos joined."""
        return max((m.joined_at_s for m in self.autos), default=-math.inf)

    @cached_property
    def _rising_bytes(self) -> Sequence[int]:
        return sorted(m.hello.memory_bytes for m in self.autos)

    @cached_property
    def total_bytes(self) -> int:
        """Memory of all autos together."""
        return sum(self._rising_bytes)

    @property
    def most_bytes(self) -> int:
        """Memory of the auto that lends most."""
        return self._rising_bytes[-1] if self.autos else 0

    def num_with(self, num_bytes: float) -> int:
        """Return how many autos lend at least so much memory."""
        return len(self.autos) - bisect_left(self._rising_bytes, num_bytes)

    @cached_property
    def bound(self) -> tuple[LayerRange, ...]:
        """Layers to which invitations restrict autos."""
        return tuple(m.grant.layers for m in self.autos if m.grant.layers)

    def in_trial_order(self, spec: RunSpec) -> list[Member]:
        """Return the autos in the order in which a run tries them.

        Members that may not see tokens come first, then members with the fewest choices, then those
        that lend all of their link, then those with the most memory.
        """
        ordered = self._by_choices(spec.model.num_blocks if self.bound else 0)
        if self.all_see_tokens and not spec.trusted_with_ends:
            return list(ordered)
        ends = [may_host_ends(spec, member) for member in ordered]
        first = [m for m, sees in zip(ordered, ends, strict=True) if not sees]
        return first + [m for m, sees in zip(ordered, ends, strict=True) if sees]

    def _by_choices(self, num_blocks: int) -> tuple[Member, ...]:
        def order(member: Member) -> tuple[int, bool, int, float]:
            hello, layers = member.hello, member.grant.layers
            is_capped = hello.max_up_bytes_per_s > 0 or hello.max_down_bytes_per_s > 0
            choices = len(layers) if layers else num_blocks
            return choices, is_capped, -hello.memory_bytes, member.joined_at_s

        if num_blocks not in self._sorted_autos:
            self._sorted_autos[num_blocks] = tuple(sorted(self.autos, key=order))
        return self._sorted_autos[num_blocks]

    def has_ends(self, spec: RunSpec) -> bool:
        """Whether an auto may host a stage that receives text and labels of the run."""
        if not spec.trusted_with_ends:
            return self._sees_tokens
        return any(may_host_ends(spec, member) for member in self.autos)

    @cached_property
    def _sees_tokens(self) -> bool:
        return any(member.grant.sees_tokens for member in self.autos)

    @cached_property
    def all_see_tokens(self) -> bool:
        """Whether no auto's invitation keeps it from text and labels."""
        return all(member.grant.sees_tokens for member in self.autos)

    # ---- members that may be refused something

    def limited(self, spec: RunSpec) -> Sequence[Member]:
        """Return the members that a run may refuse some layers; all others host any."""
        return self.members if spec.trusted_with_ends else self._limited

    @cached_property
    def _limited(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.grant != _UNLIMITED)


def may_host_ends(spec: RunSpec, member: Member) -> bool:
    """Whether a member may receive text and labels of a run."""
    return end_refusal(spec, member) is None
