"""What a stage keeps beside its weights, as tensors of a shard: residuals and buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.errors import BadSnapshot, MalformedMessage
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.peer.residuals import Residuals
from swarm_ft.protocol.digest import digest_of
from swarm_ft.snapshots.shard import ShardContents

_BUFFERS = "buffers"
"""The tensor that holds the payloads of all buffers, in the order of their names."""
_RESIDUALS = "residuals/"
"""What the names of residuals begin with."""


def with_extras(
    state: Mapping[str, Tensor], store: BufferStore, residuals: Residuals
) -> ShardContents:
    """Weights and optimizer together with copies of all else."""
    records = dict(store.records())
    names = {(k.boundary, int(k.end), k.sample): record for k, record in records.items()}
    owed = {f"{_RESIDUALS}{name}": x.clone() for name, x in residuals.export().items()}
    return ShardContents(
        state=dict(state),
        extras={**owed, **_payloads([names[name] for name in sorted(names)])},
        buffer_digests={name: record.digest for name, record in names.items()},
    )


def restore_residuals(residuals: Residuals, contents: ShardContents) -> None:
    """Take the residuals of `with_extras`.

    Raises:
        BadSnapshot: they are none.
    """
    owed = {
        name.removeprefix(_RESIDUALS): x
        for name, x in contents.extras.items()
        if name.startswith(_RESIDUALS)
    }
    try:
        residuals.restore(owed)
    except MalformedMessage as error:
        raise BadSnapshot(f"{error.message}; begin anew") from error


def restore_buffers(
    store: BufferStore, run_id: RunId, shape: tuple[int, int], contents: ShardContents
) -> None:
    """Take the buffers, [tokens, channels] each, whose payloads are those of their digests.

    Others are lost, which costs key frames.
    """
    payloads = contents.extras.get(_BUFFERS, torch.empty(0, 0, dtype=torch.uint8))
    names = sorted(contents.buffer_digests)
    for (boundary, end, sample), row in zip(names, payloads, strict=False):
        payload = row.numpy().tobytes()
        digest = contents.buffer_digests[boundary, end, sample]
        if digest_of(payload) == digest:
            key = BufferKey(run_id, BlockIndex(boundary), End(end), SampleId(sample))
            store.stage(key, BufferRecord(digest, *shape, payload))
    store.commit()


def _payloads(records: list[BufferRecord]) -> dict[str, Tensor]:
    """All payloads, uint8 [buffers, bytes]; all buffers of a run have one size."""
    if not records:
        return {}
    rows = [torch.frombuffer(bytearray(record.payload), dtype=torch.uint8) for record in records]
    return {_BUFFERS: torch.stack(rows)}
