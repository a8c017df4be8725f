"""What a stage keeps beside its weights, as parts of a shard: residuals and buffers.

A shard holds the buffers as long as they are few. Large sets stay where they are, on the peers'
disks: who goes back to the snapshot goes on with what is there by then, newer ones too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.errors import BadSnapshot, MalformedMessage
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.log import get_logger
from swarm_ft.peer.residuals import Residuals
from swarm_ft.protocol.digest import fingerprint_of
from swarm_ft.snapshots.shard import BufferName, ShardContents

logger = get_logger(__name__)

MAX_BUFFER_BYTES = 64 << 20
"""Of all buffers in a shard; they are copied in memory while it is written."""
_BUFFERS = {
    End.SENT: "buffers/sent",
    End.RECEIVED: "buffers/received",
    End.RESIDUAL: "buffers/owed",
}
"""The tensors that hold the payloads of all buffers of an end, in the order of their names. Within
an end all have one size: of the run's bits, and of 16 bits what is owed."""
_RESIDUALS = "residuals/"
"""What the names of residuals begin with."""


def with_extras(
    state: Mapping[str, Tensor], store: BufferStore, residuals: Residuals
) -> ShardContents:
    """Weights and optimizer together with copies of all else. Waits for the disk."""
    owed = {f"{_RESIDUALS}{name}": x.clone() for name, x in residuals.export().items()}
    records = _few_records(store)
    return ShardContents(
        state=dict(state),
        extras={**owed, **_payloads(records)},
        buffer_digests={name: record.digest for name, record in records.items()},
    )


def _few_records(store: BufferStore) -> dict[BufferName, BufferRecord]:
    """All records, or none if they are too many."""
    found: dict[BufferName, BufferRecord] = {}
    num_records, num_bytes = len(store), 0
    for key, record in store.records():
        num_bytes += len(record.payload)
        # Most have one size: the first tells what reading them all would come to.
        if max(num_bytes, num_records * len(record.payload)) > MAX_BUFFER_BYTES:
            logger.info("%d buffers are too many for a snapshot; they stay here", num_records)
            return {}
        found[key.boundary, int(key.end), key.sample] = record
    return found


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

    There are then no others. If the shard has none, those that are here stay, older and newer ones
    too: each costs a key frame at most.
    """
    if not contents.buffer_digests:
        return
    store.forget()
    for end in End:
        payloads = contents.extras.get(_BUFFERS[end], torch.empty(0, 0, dtype=torch.uint8))
        names = sorted(name for name in contents.buffer_digests if name[1] == end)
        for name, row in zip(names, payloads, strict=False):
            payload, digest = row.numpy().tobytes(), contents.buffer_digests[name]
            if fingerprint_of(payload) == digest:
                key = BufferKey(run_id, BlockIndex(name[0]), end, SampleId(name[2]))
                store.put(key, BufferRecord(digest, *shape, payload))


def _payloads(records: Mapping[BufferName, BufferRecord]) -> dict[str, Tensor]:
    """All payloads, uint8 [buffers, bytes], of each end that has some."""
    rows: dict[str, list[Tensor]] = {}
    for name in sorted(records):
        row = torch.frombuffer(bytearray(records[name].payload), dtype=torch.uint8)
        rows.setdefault(_BUFFERS[End(name[1])], []).append(row)
    return {tensor: torch.stack(of_end) for tensor, of_end in rows.items()}
