"""Chance that two members connect only over a relay."""

import pytest

from swarm_ft.coordinator.facts.connectivity import (
    PUNCH_FAILS_PERCENT,
    Connectivity,
    NatInfo,
    pair_of,
)
from swarm_ft.protocol.messages.meeting import Way

CONE = NatInfo(house="198.51.100.1")
OTHER_CONE = NatInfo(house="198.51.100.2", is_open_within=True)
NEIGHBOUR = NatInfo(house="198.51.100.2")
VARYING = NatInfo(house="198.51.100.3", mapping_varies=True)
OPEN = NatInfo(house="198.51.100.4", is_open=True)


@pytest.mark.parametrize(
    ("one", "other", "percent"),
    [
        (None, None, PUNCH_FAILS_PERCENT),
        (None, CONE, PUNCH_FAILS_PERCENT),
        (None, OPEN, 0),
        (None, VARYING, 100),
        (CONE, OTHER_CONE, PUNCH_FAILS_PERCENT),
        (CONE, VARYING, 100),
        (VARYING, VARYING, 100),
        (OPEN, VARYING, 0),
        (OPEN, CONE, 0),
        (OTHER_CONE, NEIGHBOUR, 0),
        (NEIGHBOUR, NEIGHBOUR, PUNCH_FAILS_PERCENT),
    ],
)
def test_routers_say_what_is_to_be_expected(
    one: NatInfo | None, other: NatInfo | None, percent: int
) -> None:
    homes = {name: home for name, home in (("a", one), ("b", other)) if home is not None}
    ways = Connectivity(homes=homes)
    assert ways.relayed_percent("a", "b") == ways.relayed_percent("b", "a") == percent
    assert ways.is_open_question("a", "b") == (percent == PUNCH_FAILS_PERCENT)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("home", [OPEN, CONE, VARYING])
def test_what_was_seen_counts_before_what_is_expected(home: NatInfo, way: Way) -> None:
    ways = Connectivity(homes={"a": home, "b": CONE}, met={pair_of("b", "a"): way})
    assert ways.relayed_percent("a", "b") == (100 if way is Way.RELAYED else 0)
    assert not ways.is_open_question("b", "a")
