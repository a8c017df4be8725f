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

_BUFFERS = {
    End.SENT: "buffers/sent",
    End.RECEIVED: "buffers/received",
    End.RESIDUAL: "buffers/owed",
}
"""The tensors that hold the payloads of all buffers of an end, in the order of their names. Within
an end all have one size: of the run's bits, and of 16 bits what is owed."""
_Name = tuple[int, int, int]
"""Boundary, end and sample."""
_RESIDUALS = "residuals/"
"""What the names of residuals begin with."""


def with_extras(
    state: Mapping[str, Tensor], store: BufferStore, residuals: Residuals
) -> ShardContents:
    """Weights and optimizer together with copies of all else."""
    records = store.records()
    names: dict[_Name, BufferRecord] = {
        (key.boundary, int(key.end), key.sample): record for key, record in records.items()
    }
    owed = {f"{_RESIDUALS}{name}": x.clone() for name, x in residuals.export().items()}
    return ShardContents(
        state=dict(state),
        extras={**owed, **_payloads(names)},
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
    for end in End:
        payloads = contents.extras.get(_BUFFERS[end], torch.empty(0, 0, dtype=torch.uint8))
        names = sorted(name for name in contents.buffer_digests if name[1] == end)
        for name, row in zip(names, payloads, strict=False):
            payload, digest = row.numpy().tobytes(), contents.buffer_digests[name]
            if digest_of(payload) == digest:
                key = BufferKey(run_id, BlockIndex(name[0]), end, SampleId(name[2]))
                store.stage(key, BufferRecord(digest, *shape, payload))
    store.commit()


def _payloads(records: Mapping[_Name, BufferRecord]) -> dict[str, Tensor]:
    """All payloads, uint8 [buffers, bytes], of each end that has some."""
    rows: dict[str, list[Tensor]] = {}
    for name in sorted(records):
        row = torch.frombuffer(bytearray(records[name].payload), dtype=torch.uint8)
        rows.setdefault(_BUFFERS[End(name[1])], []).append(row)
    return {tensor: torch.stack(of_end) for tensor, of_end in rows.items()}
