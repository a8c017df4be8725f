from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from swarm_ft.ids import RunId, StepNumber
from swarm_ft.protocol.messages.control import SavedStage
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.snapshots.shard import ShardContents, write_shard
from swarm_ft.snapshots.store import Manifest, SnapshotStore

SPEC = bytes(range(16))
CUTS = (LayerRange(0, 12), LayerRange(12, 24))


class SaveSnapshot(Protocol):
    """Saver of a complete snapshot of two stages; `seed` draws its contents, the step if None."""

    def __call__(
        self, store: SnapshotStore, step: int, run: str = "run-1", seed: int | None = None
    ) -> Manifest: ...


def shard_name(step: int, layers: LayerRange = CUTS[0], run: str = "run-1") -> ShardName:
    return ShardName(run_id=RunId(run), step=StepNumber(step), layers=layers)


def contents(seed: int) -> ShardContents:
    """Return random weights with extras and digests of buffers."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 30, generator=generator)
    return ShardContents(
        state={"h.0.weight": weight, "adamw/step/h.0.weight": torch.tensor(float(seed))},
        extras={"dp/worker": weight.half(), "dp/server": weight[:, ::2].bfloat16()},
        buffer_digests={(12, 2, 7): seed.to_bytes(16), (0, 1, 3): b"0123456789abcdef"},
    )


def manifest_of(name: ShardName, shards: Iterable[SavedStage], **changes: Any) -> Manifest:
    made = Manifest(
        run_id=name.run_id,
        spec_digest=SPEC,
        step=name.step,
        epoch=name.step // 3,
        step_in_epoch=name.step % 3,
        seed=11,
        shards=tuple(shards),
    )
    return replace(made, **changes)


def latest_of(store: SnapshotStore) -> Manifest | None:
    """Return the newest snapshot of the run that `save` saves."""
    found = store.list_snapshots(RunId("run-1"), SPEC)
    return found[-1] if found else None


def check_whole(store: SnapshotStore, manifest: Manifest, folder: Path) -> None:
    """Fetch every shard, which reads it."""
    for entry in manifest.shards:
        store.fetch_shard(manifest, entry.layers, folder)


@pytest.fixture
def save(tmp_path: Path) -> SaveSnapshot:
    """Saver of complete snapshots of two stages, as `save(store, 42)`."""

    def make(
        store: SnapshotStore, step: int, run: str = "run-1", seed: int | None = None
    ) -> Manifest:
        entries = []
        for layers in CUTS:
            name = shard_name(step, layers, run)
            what = contents(step if seed is None else seed)
            entries.append(store.put_shard(name, write_shard(tmp_path, name, SPEC, what)))
        manifest = manifest_of(name, entries)
        store.commit(manifest)
        return manifest

    return make
