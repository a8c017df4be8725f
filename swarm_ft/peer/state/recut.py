"""A stage's state from a snapshot with other stages, exact for every block.

Tensors have the same names in every stage, so that weights and optimizer state are found by name.
Residuals of error feedback are one row, weight after weight in the order of their names; the row is
split and reassembled. Buffers stay if their boundary still exists, with this stage on the same
side; other boundaries begin with key frames.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from swarm_ft.errors import BadFrame, BadSnapshot
from swarm_ft.peer.boundary.side_info import boundary_of
from swarm_ft.peer.state.stage_state import RESIDUALS, buffers_in, payloads
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.snapshots.shard import SIDE_INFO, ShardContents

Parts = Mapping[LayerRange, ShardContents]
"""Shards of a snapshot, by the layers of their stages."""


def recut(parts: Parts, layers: LayerRange, names: Collection[str], channels: int) -> ShardContents:
    """Return the contents of a shard with other layers.

    Args:
        parts: All shards with some of the layers.
        layers: Layers of the new stage.
        names: Names of the tensors of its state; tensors that no part has are missing in the
            result.
        channels: Channels of the hidden states in buffers.

    Raises:
        BadSnapshot: A part has a tensor that no shard has.
    """
    state: dict[str, Tensor] = {}
    for contents in parts.values():
        # A weight that several stages hold is equal in all of them.
        state.update((name, x) for name, x in contents.state.items() if name in names)
    common = {
        name: record
        for old, contents in parts.items()
        for name, record in buffers_in(contents, channels)
        if name[0] in _common_boundaries(old, layers)
    }
    return ShardContents(
        state=state,
        extras={**_residuals(parts, state), **_side_info(parts, layers), **payloads(common)},
        buffer_digests={name: record.digest for name, record in common.items()},
    )


def _common_boundaries(old: LayerRange, new: LayerRange) -> set[int]:
    """Return the boundaries that both stages have, on the same side."""
    common = {old.start} if old.start == new.start else set()
    return common | ({old.stop} if old.stop == new.stop else set())


def _side_info(parts: Parts, layers: LayerRange) -> dict[str, Tensor]:
    """Return the side information of boundaries that remain."""
    return {
        name: x
        for old, contents in parts.items()
        for name, x in contents.extras.items()
        if name.startswith(SIDE_INFO) and _boundary_of(name) in _common_boundaries(old, layers)
    }


def _boundary_of(name: str) -> int:
    try:
        return boundary_of(name.removeprefix(SIDE_INFO))
    except BadFrame as error:
        raise BadSnapshot(error.message) from error


def _residuals(parts: Parts, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the residuals of all weights; empty if no part has any.

    The values that this peer sums change, so the server's residuals come from the parts that had
    them.
    """
    workers: dict[str, Tensor] = {}
    servers: dict[str, Tensor] = {}
    for contents in parts.values():
        workers |= _by_weight(contents, _worker(contents))
        servers |= _by_weight(contents, _server(contents))
    if not workers:
        return {}
    return {
        f"{RESIDUALS}worker": _in_a_row(state, workers),
        f"{RESIDUALS}server": _in_a_row(state, servers),
        f"{RESIDUALS}server_start": torch.tensor([0]),
    }


def _worker(contents: ShardContents) -> Tensor | None:
    return contents.extras.get(f"{RESIDUALS}worker")


def _server(contents: ShardContents) -> Tensor | None:
    """Return the server's residual in the worker's length, with zeros outside of the shard."""
    worker, server = _worker(contents), contents.extras.get(f"{RESIDUALS}server")
    start = contents.extras.get(f"{RESIDUALS}server_start")
    if worker is None or server is None or start is None or start.numel() != 1:
        return None
    first = int(start)
    if not 0 <= first <= len(worker) - len(server):
        return None
    whole = torch.zeros_like(worker)
    whole[first : first + len(server)] = server
    return whole


def _by_weight(contents: ShardContents, row: Tensor | None) -> dict[str, Tensor]:
    """Split a row by weight; empty if its length does not fit the weights."""
    weights = dict(_weights(contents.state))
    sizes = [x.numel() for x in weights.values()]
    if row is None or row.shape != (sum(sizes),):
        return {}
    return dict(zip(weights, torch.split(row, sizes), strict=True))


def _in_a_row(state: Mapping[str, Tensor], owed: Mapping[str, Tensor]) -> Tensor:
    parts = [owed.get(name, torch.zeros(x.numel())).reshape(-1) for name, x in _weights(state)]
    return torch.cat(parts) if parts else torch.zeros(0)


def _weights(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights alone, in the order of their names; optimizer state has a path as its name."""
    return ((name, state[name]) for name in sorted(state) if "/" not in name)
