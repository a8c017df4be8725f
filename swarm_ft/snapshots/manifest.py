"""The list of a snapshot's shards, as JSON. Knows no files.

A snapshot exists when its manifest does; the manifest is written last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from swarm_ft.errors import BadSnapshot, SwarmError
from swarm_ft.ids import RunId, StepNumber
from swarm_ft.protocol.checks import bounded, checked_digest, checked_id
from swarm_ft.protocol.layers import MAX_BLOCKS, LayerRange
from swarm_ft.protocol.run_spec import MAX_STEPS, RunSpec
from swarm_ft.protocol.shard import CHUNK_BYTES, MAX_CHUNKS, ShardName

VERSION = 1
MAX_MANIFEST_BYTES = 1 << 20
"""Far above what MAX_BLOCKS stages of one block need."""
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One stage's shard.

    Attributes:
        digest: of the file, see `protocol.shard.ChunkList`.
        total_bytes: of the file.
    """

    layers: LayerRange
    digest: bytes
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A snapshot.

    Attributes:
        spec_digest: of the RunSpec that the run works by.
        step: how many steps are in it.
        epoch, step_in_epoch: where in the data the next step begins.
        seed: of the run; data order and dropout follow from it and the step.
        shards: of all stages, first to last.
    """

    run_id: RunId
    spec_digest: bytes
    step: StepNumber
    epoch: int
    step_in_epoch: int
    seed: int
    shards: tuple[ShardEntry, ...]

    def __post_init__(self) -> None:
        ranges = [shard.layers for shard in self.shards]
        adjoin = all(a.stop == b.start for a, b in pairwise(ranges))
        if not ranges or ranges[0].start != 0 or not adjoin:
            raise BadSnapshot(
                f"snapshot of run {self.run_id}, step {self.step}: expected adjoining layers from "
                f"0 on, got {', '.join(map(str, ranges)) or 'none'}"
            )

    def shard(self, layers: LayerRange) -> ShardEntry:
        """The entry of a stage.

        Raises:
            BadSnapshot: the snapshot was cut otherwise.
        """
        for shard in self.shards:
            if shard.layers == layers:
                return shard
        cuts = ", ".join(str(shard.layers) for shard in self.shards)
        raise BadSnapshot(
            f"snapshot of run {self.run_id}, step {self.step}: has layers {cuts}, not {layers}; "
            f"host the same stages, or start the run anew"
        )

    def name_of(self, shard: ShardEntry) -> ShardName:
        """What that shard is called."""
        return ShardName(run_id=self.run_id, step=self.step, layers=shard.layers)

    @classmethod
    def of_run(
        cls, run_id: RunId, spec: RunSpec, step: StepNumber, shards: tuple[ShardEntry, ...]
    ) -> Manifest:
        """The manifest of a run's state after `step` steps.

        Raises:
            BadSnapshot: the shards' layers do not adjoin, from 0 on.
        """
        epoch, step_in_epoch = divmod(step, spec.train.steps_per_epoch)
        return cls(
            run_id=run_id,
            spec_digest=spec.digest(),
            step=step,
            epoch=epoch,
            step_in_epoch=step_in_epoch,
            seed=spec.train.seed,
            shards=tuple(sorted(shards, key=lambda shard: shard.layers)),
        )

    def to_json(self) -> bytes:
        """As it lies in the store."""
        document = {
            "version": VERSION,
            "run": self.run_id,
            "spec": self.spec_digest.hex(),
            "step": self.step,
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "seed": self.seed,
            "shards": [
                {
                    "layers": [shard.layers.start, shard.layers.stop],
                    "digest": shard.digest.hex(),
                    "bytes": shard.total_bytes,
                }
                for shard in self.shards
            ],
        }
        return (json.dumps(document, indent=2) + "\n").encode()


def manifest_from_json(data: bytes) -> Manifest:
    """What `to_json` wrote.

    Raises:
        BadSnapshot: torn, of another version, or a field is out of its bounds.
    """
    try:
        document = json.loads(data)
        bounded("version", _count(document["version"], MAX_STEPS), VERSION, VERSION)
        return Manifest(
            run_id=RunId(checked_id("run", document["run"])),
            spec_digest=_digest(document["spec"]),
            step=StepNumber(_count(document["step"], MAX_STEPS)),
            epoch=_count(document["epoch"], MAX_STEPS),
            step_in_epoch=_count(document["step_in_epoch"], MAX_STEPS),
            seed=_count(document["seed"], MAX_SEED),
            shards=tuple(_entry(shard) for shard in document["shards"][: MAX_BLOCKS + 1]),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadSnapshot(f"manifest: not one that is written here ({error!r:.200})") from error
    except SwarmError as error:
        raise BadSnapshot(f"manifest: {error.message}") from error


def _entry(shard: dict[str, Any]) -> ShardEntry:
    start, stop = shard["layers"]
    return ShardEntry(
        layers=LayerRange(_count(start, MAX_BLOCKS), _count(stop, MAX_BLOCKS)),
        digest=_digest(shard["digest"]),
        total_bytes=_count(shard["bytes"], CHUNK_BYTES * MAX_CHUNKS),
    )


def _count(value: object, high: int) -> int:
    # Python takes 1.0 and true for the integers they equal.
    if type(value) is not int:
        raise TypeError(f"expected an integer, got {value!r:.40}")
    return bounded("number", value, 0, high)


def _digest(value: object) -> bytes:
    return checked_digest("digest", bytes.fromhex(str(value)))
