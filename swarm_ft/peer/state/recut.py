"""A stage's state from a snapshot of other stages: of every block what its stage had. Exact.

Tensors are called alike in any stage, so weights and what the optimizer keeps of them are found by
name. What error feedback left over lies in one row, weight after weight in the order of their
names: it is cut up and put together anew. Buffers are those of boundaries that are still there, on
the same side of them; others begin with key frames.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from swarm_ft.errors import BadFrame, BadSnapshot
from swarm_ft.peer.boundary.bases import boundary_of
from swarm_ft.peer.state.stage_state import BASES, RESIDUALS, buffers_in, payloads
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.snapshots.shard import ShardContents

Parts = Mapping[LayerRange, ShardContents]
"""Shards of a snapshot, by the layers of their stages."""


def recut(parts: Parts, layers: LayerRange, names: Collection[str], channels: int) -> ShardContents:
    """What the shard of other layers would hold.

    Args:
        parts: all that have some of the layers.
        layers: of the stage that is to go on.
        names: of the tensors of its state; what the parts lack is missing in the result.
        channels: of the hidden states that buffers keep.

    Raises:
        BadSnapshot: a part has what no shard has.
    """
    state: dict[str, Tensor] = {}
    for contents in parts.values():
        # A weight that several stages hold is the same in all of them.
        state.update((name, x) for name, x in contents.state.items() if name in names)
    kept = {
        name: record
        for old, contents in parts.items()
        for name, record in buffers_in(contents, channels)
        if name[0] in _boundaries_kept(old, layers)
    }
    return ShardContents(
        state=state,
        extras={**_residuals(parts, state), **_bases(parts, layers), **payloads(kept)},
        buffer_digests={name: record.digest for name, record in kept.items()},
    )


def _boundaries_kept(old: LayerRange, new: LayerRange) -> set[int]:
    """Of the old stage's those that are the new one's, with the same blocks beside them."""
    kept = {old.start} if old.start == new.start else set()
    return kept | ({old.stop} if old.stop == new.stop else set())


def _bases(parts: Parts, layers: LayerRange) -> dict[str, Tensor]:
    """What is sent along over the boundaries that stay."""
    return {
        name: x
        for old, contents in parts.items()
        for name, x in contents.extras.items()
        if name.startswith(BASES) and _boundary_of(name) in _boundaries_kept(old, layers)
    }


def _boundary_of(name: str) -> int:
    try:
        return boundary_of(name.removeprefix(BASES))
    except BadFrame as error:
        raise BadSnapshot(error.message) from error


def _residuals(parts: Parts, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is owed of every weight, put together; nothing where no part owes anything.

    What this peer summed of the stage is other values now: it owes what a part had of them.
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
    """As long as the worker's, with nothing owed of values that others sum."""
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
    """The row cut up, if it has a value for each of the stage's weights' values."""
    weights = dict(_weights(contents.state))
    sizes = [x.numel() for x in weights.values()]
    if row is None or row.shape != (sum(sizes),):
        return {}
    return dict(zip(weights, torch.split(row, sizes), strict=True))


def _in_a_row(state: Mapping[str, Tensor], owed: Mapping[str, Tensor]) -> Tensor:
    parts = [owed.get(name, torch.zeros(x.numel())).reshape(-1) for name, x in _weights(state)]
    return torch.cat(parts) if parts else torch.zeros(0)


def _weights(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights alone, in the order of their names: what an optimizer keeps has a path for a name."""
    return ((name, state[name]) for name in sorted(state) if "/" not in name)
