"""Keys that each peer of a run gets, from which no other key can be derived."""

import itertools

import pytest

from swarm_ft.coordinator.plan.stage_keys import peer_key, stage_keys
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import SavedStage
from swarm_ft.protocol.spec.layers import LayerRange

KEY = bytes(range(32))


def saved(*cuts: tuple[int, int]) -> list[SavedStage]:
    return [SavedStage(layers=LayerRange(*cut), digest=b"d" * 16, total_bytes=1) for cut in cuts]


@pytest.mark.parametrize(
    ("own", "cuts", "expected"),
    [
        ((2, 4), [], ["2-4"]),
        ((2, 4), [(0, 2), (2, 4), (4, 6)], ["2-4"]),
        ((1, 3), [(0, 2), (2, 4), (4, 6)], ["0-2", "1-3", "2-4"]),
        ((0, 6), [(0, 2), (2, 4), (4, 6)], ["0-2", "0-6", "2-4", "4-6"]),
        ((4, 6), [(0, 4), (4, 5), (5, 6)], ["4-5", "4-6", "5-6"]),
    ],
)
def test_a_peer_has_keys_of_its_stage_and_of_the_saved_ones_that_have_its_layers_alone(
    own: tuple[int, int], cuts: list[tuple[int, int]], expected: list[str]
) -> None:
    keys = stage_keys(KEY, LayerRange(*own), saved(*cuts))
    assert sorted(map(str, keys)) == expected


def test_a_stage_has_one_key_whoever_has_it() -> None:
    whole = stage_keys(KEY, LayerRange(0, 6), saved((0, 2), (2, 6)))
    for cut in ((0, 2), (2, 6)):
        layers = LayerRange(*cut)
        assert stage_keys(KEY, layers, ())[layers] == whole[layers]


def test_no_two_keys_are_alike_and_none_is_the_runs() -> None:
    ranges = [LayerRange(a, b) for a, b in itertools.combinations(range(5), 2)]
    keys = [KEY, *(stage_keys(KEY, layers, ())[layers] for layers in ranges)]
    keys += [peer_key(KEY, PeerId(name)) for name in ("a", "b", "0-2")]
    keys += [*stage_keys(bytes(32), ranges[0], ()).values(), peer_key(bytes(32), PeerId("a"))]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}


def test_a_run_without_a_key_has_none() -> None:
    assert not stage_keys(b"", LayerRange(0, 2), saved((0, 2)))
    assert not peer_key(b"", PeerId("a"))
