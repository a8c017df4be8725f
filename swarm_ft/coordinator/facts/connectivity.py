"""Connectivity of members: the behaviour of their routers, and results of meetings. Values.

`coordinator.meetings` fills it, and again after a restart, since members call again. A member's
report affects only its own links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from swarm_ft.protocol.messages.meeting import Way

PUNCH_FAILS_PERCENT = 30
"""Percent of failures between two home routers (arXiv 2510.27500: 70 % +- 7 % of 4.4 million
worked).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NatInfo:
    """A member's place in the network.

    Attributes:
        house: Address from which its calls arrive: its router's, or its own. Members behind the
            coordinator's own router have the house "".
        is_open: Whether anybody may dial it at that address: the address is its own, or a port is
            forwarded.
        is_open_within: Whether members of the same house may dial it.
        mapping_varies: Whether its router maps each destination to another port, so that punching
            fails.
    """

    house: str
    is_open: bool = False
    is_open_within: bool = False
    mapping_varies: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Connectivity:
    """The places of members, and how pairs of them connected.

    Attributes:
        homes: Place of each member, by name.
        met: Connection of each pair at its last meeting; keys as `pair_of` returns them.
    """

    homes: Mapping[str, NatInfo] = field(default_factory=lambda: MappingProxyType({}))
    met: Mapping[tuple[str, str], Way] = field(default_factory=lambda: MappingProxyType({}))

    def relayed_percent(self, one: str, other: str) -> int:
        """Return the chance of a relay between these two, in percent.

        An observed connection counts before all else. The answer is the same for all pairs of which
        neither place is known.
        """
        way = self.met.get(pair_of(one, other))
        if way is not None:
            return 100 if way is Way.RELAYED else 0
        homes = [self.homes[name] for name in (one, other) if name in self.homes]
        if any(home.is_open for home in homes) or _is_one_house(homes):
            return 0
        return 100 if any(home.mapping_varies for home in homes) else PUNCH_FAILS_PERCENT

    def is_open_question(self, one: str, other: str) -> bool:
        """Whether only a meeting can show how these two reach each other."""
        return 0 < self.relayed_percent(one, other) < 100


def pair_of(one: str, other: str) -> tuple[str, str]:
    """Return the two names in sorted order."""
    return (one, other) if one < other else (other, one)


def _is_one_house(homes: Sequence[NatInfo]) -> bool:
    """Whether these two are in one house, in which either may dial the other."""
    houses = {home.house for home in homes}
    return len(homes) > len(houses) and any(home.is_open_within for home in homes)
