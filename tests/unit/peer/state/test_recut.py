from dataclasses import replace

import pytest
import torch

from swarm_ft.buffers.records import BufferRecord
from swarm_ft.digest import fingerprint_of
from swarm_ft.errors import BadSnapshot
from swarm_ft.peer.reduce.gradient_coder import Residuals
from swarm_ft.peer.state.recut import recut
from swarm_ft.peer.state.stage_state import (
    buffers_in,
    payloads,
    restore_residuals,
)
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.snapshots.shard import BufferName, ShardContents

CHANNELS = 4


def state_of(layers: LayerRange) -> dict[str, torch.Tensor]:
    """Two weights a block, of different sizes, with what an optimizer keeps of them."""
    state = {}
    for block in range(layers.start, layers.stop):
        for name, size in (("bias", 2), ("weight", 3)):
            weight = torch.arange(size) + 100.0 * block + 10 * (name == "weight")
            state[f"h.{block}.{name}"] = weight
            state[f"adamw/exp_avg/h.{block}.{name}"] = -weight
    return state


def row_of(layers: LayerRange) -> torch.Tensor:
    """Return residuals in which each weight has its own values."""
    state = state_of(layers)
    return torch.cat([state[name] for name in sorted(state) if "/" not in name])


def record(text: str) -> BufferRecord:
    payload = text.encode()
    return BufferRecord(fingerprint_of(payload), 1, CHANNELS, payload)


def part(layers: LayerRange, *, server: tuple[int, int] | None = None) -> ShardContents:
    """A stage's shard, with one sample's buffers of both of its boundaries."""
    row = row_of(layers)
    first, stop = server or (0, len(row))
    names: list[BufferName] = [
        (boundary, end, 7) for boundary in (layers.start, layers.stop) for end in (1, 2)
    ]
    records = {name: record(f"{name} of {layers}") for name in names}
    return ShardContents(
        state=state_of(layers),
        extras={
            "residuals/worker": row,
            "residuals/server": row[first:stop].clone(),
            "residuals/server_start": torch.tensor([first]),
            **payloads(records),
        },
        buffer_digests={name: one.digest for name, one in records.items()},
    )


def parts(*cuts: tuple[int, int]) -> dict[LayerRange, ShardContents]:
    return {LayerRange(*cut): part(LayerRange(*cut)) for cut in cuts}


def as_one(found: ShardContents) -> dict[str, list[float]]:
    return {name: x.tolist() for name, x in found.state.items()}


def test_every_blocks_state_is_found_by_its_names() -> None:
    for layers in (LayerRange(0, 12), LayerRange(1, 11), LayerRange(3, 4)):
        expected = state_of(layers)
        found = recut(parts((0, 2), (2, 10), (10, 12)), layers, frozenset(expected), CHANNELS)
        assert as_one(found) == {name: x.tolist() for name, x in expected.items()}


def test_what_is_owed_goes_with_its_weights_whatever_their_order() -> None:
    """Block 10 comes before block 2 by its name."""
    layers = LayerRange(1, 11)
    names = frozenset(state_of(layers))
    found = recut(parts((0, 2), (2, 10), (10, 12)), layers, names, CHANNELS)
    residuals = Residuals()
    restore_residuals(residuals, found)
    owed = residuals.export()
    assert torch.equal(owed["worker"], row_of(layers))
    assert torch.equal(owed["server"], row_of(layers))


def test_of_a_part_that_it_did_not_sum_a_peer_owes_nothing() -> None:
    lower, upper = LayerRange(0, 1), LayerRange(1, 2)
    shards = {lower: part(lower, server=(0, 2)), upper: part(upper, server=(3, 5))}
    found = recut(shards, LayerRange(0, 2), frozenset(state_of(LayerRange(0, 2))), CHANNELS)
    row = row_of(LayerRange(0, 2))
    row[2:8] = 0.0
    assert torch.equal(found.extras["residuals/server"], row)


def test_buffers_are_those_of_boundaries_that_are_still_there() -> None:
    layers = LayerRange(2, 6)
    found = recut(parts((0, 2), (2, 4), (4, 6), (6, 8)), layers, frozenset(), CHANNELS)
    payloads = {name: one.payload.decode() for name, one in buffers_in(found, CHANNELS)}
    assert payloads == {
        (2, 1, 7): "(2, 1, 7) of 2-4",
        (2, 2, 7): "(2, 2, 7) of 2-4",
        (6, 1, 7): "(6, 1, 7) of 4-6",
        (6, 2, 7): "(6, 2, 7) of 4-6",
    }


def with_basis(shard: ShardContents, name: str) -> ShardContents:
    more = {f"bases/{name}": torch.zeros(1), f"bases/{name}/steps": torch.tensor(3)}
    return replace(shard, extras={**shard.extras, **more})


def test_bases_are_those_of_boundaries_that_are_still_there() -> None:
    """A stage's sending end keeps its bases; the other end receives them."""
    shards = {
        layers: with_basis(shard, f"{layers.stop}/2")
        for layers, shard in parts((0, 2), (2, 4), (4, 6), (6, 8)).items()
    }
    for layers, expected in ((LayerRange(2, 6), {"6/2"}), (LayerRange(3, 5), set[str]())):
        found = recut(shards, layers, frozenset(), CHANNELS).extras
        names = {name for name in found if name.startswith("bases/")}
        assert names == {f"bases/{name}{end}" for name in expected for end in ("", "/steps")}


def test_a_basis_of_no_boundary_is_no_snapshot() -> None:
    layers = LayerRange(0, 2)
    with pytest.raises(BadSnapshot, match="expected a boundary and a kind"):
        recut({layers: with_basis(part(layers), "2/x")}, layers, frozenset(), CHANNELS)


def test_a_row_that_does_not_fit_its_weights_is_not_used() -> None:
    layers = LayerRange(0, 1)
    torn = part(layers)
    torn = ShardContents(
        state=torn.state,
        extras={
            **torn.extras,
            "residuals/worker": torch.zeros(3),
            "residuals/server": torch.ones(9),
        },
    )
    assert not recut({layers: torn}, layers, frozenset(torn.state), CHANNELS).extras
