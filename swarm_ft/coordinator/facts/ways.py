"""Who reaches whom, and how: what members' routers do, and what came of their meetings. Values.

Introductions know it (`coordinator.meetings`) and tell it again after a restart, since members call
again. A member's word makes its own links look better or worse, and nobody else's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from swarm_ft.protocol.messages.meeting import Way

PUNCH_FAILS_PERCENT = 30
"""Of pairs behind two home routers (arXiv 2510.27500: 70 % +- 7 % of 4.4 million succeeded)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """What is known of where a member is.

    Attributes:
        house: the address that its calls come from, which is its router's or its own; one of the
            coordinator's own house is of the house "".
        is_open: anybody may dial it there: that is its own, or a port is forwarded or mapped.
        is_open_within: others of its house may dial it.
        mapping_varies: its router gives each destination another port: it cannot be punched.
    """

    house: str
    is_open: bool = False
    is_open_within: bool = False
    mapping_varies: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """See the module's docstring.

    Attributes:
        homes: by the names of members.
        met: how pairs reached each other when they met last, by their names as `pair_of` has them.
    """

    homes: Mapping[str, Home] = field(default_factory=lambda: MappingProxyType({}))
    met: Mapping[tuple[str, str], Way] = field(default_factory=lambda: MappingProxyType({}))

    def relayed_percent(self, one: str, other: str) -> int:
        """How likely a link of these two goes over a relay; what was seen counts before all else.

        Where nothing is known of either it is the same for all.
        """
        way = self.met.get(pair_of(one, other))
        if way is not None:
            return 100 if way is Way.RELAYED else 0
        homes = [self.homes[name] for name in (one, other) if name in self.homes]
        if any(home.is_open for home in homes) or _is_one_house(homes):
            return 0
        return 100 if any(home.mapping_varies for home in homes) else PUNCH_FAILS_PERCENT

    def is_open_question(self, one: str, other: str) -> bool:
        """Whether only a meeting can tell how these two reach each other."""
        return 0 < self.relayed_percent(one, other) < 100


def pair_of(one: str, other: str) -> tuple[str, str]:
    """The two names in their order, whoever called whom."""
    return (one, other) if one < other else (other, one)


def _is_one_house(homes: Sequence[Home]) -> bool:
    """Whether these two are of one house, in which either may dial the other."""
    houses = {home.house for home in homes}
    return len(homes) > len(houses) and any(home.is_open_within for home in homes)
