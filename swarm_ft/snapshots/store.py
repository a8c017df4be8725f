"""Store of runs' snapshots: a folder, or any other url that fsspec knows.

    run-DIGEST/step-00000042/layers-0-12.safetensors
    run-DIGEST/step-00000042/layers-12-24.safetensors
    run-DIGEST/step-00000042/manifest.json

A run's folder has the digest of its name, which the manifest contains. A run of an earlier version
keeps its folder there, which has the run's name itself. A snapshot exists from the moment its
manifest does; shards without one are an unfinished snapshot. A shard is replaced only after its
manifest is gone. All methods block: call them in a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import atomic_write
from swarm_ft.digest import file_stem
from swarm_ft.errors import BadSnapshot, SwarmError
from swarm_ft.ids import RunId, StepNumber
from swarm_ft.protocol.messages.control import SavedStage
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, MAX_CHUNKS, ChunkList, ShardName
from swarm_ft.protocol.spec.bounds import DIGEST, Name, Range, check_bound
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange
from swarm_ft.protocol.spec.run_spec import MAX_STEPS, RunSpec
from swarm_ft.snapshots.files import StoredFiles
from swarm_ft.snapshots.local_files import chunks_of

# ---- the list of a snapshot's shards, as JSON
#
# A snapshot exists when its manifest does; the manifest is written last.

VERSION = 1
MAX_MANIFEST_BYTES = 1 << 20
"""Bytes of a manifest, far above the need of MAX_BLOCKS stages of one block."""
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Manifest of a snapshot.

    Attributes:
        run_id: Name of the run.
        spec_digest: Digest of the run's RunSpec.
        step: Number of steps in the state.
        epoch: Epoch of the next step.
        step_in_epoch: Number of the next step in its epoch.
        seed: Seed of the run; data order and dropout follow from it and the step.
        shards: Shards of all stages, first to last.
    """

    run_id: RunId
    spec_digest: bytes
    step: StepNumber
    epoch: int
    step_in_epoch: int
    seed: int
    shards: tuple[SavedStage, ...]

    def __post_init__(self) -> None:
        ranges = [shard.layers for shard in self.shards]
        adjoin = all(a.stop == b.start for a, b in pairwise(ranges))
        if not ranges or ranges[0].start != 0 or not adjoin:
            raise BadSnapshot(
                f"snapshot of run {self.run_id}, step {self.step}: expected adjoining layers from "
                f"0 on, got {', '.join(map(str, ranges)) or 'none'}"
            )

    def shard(self, layers: LayerRange) -> SavedStage:
        """Return the entry of a stage.

        Raises:
            BadSnapshot: The snapshot has other stages.
        """
        for shard in self.shards:
            if shard.layers == layers:
                return shard
        cuts = ", ".join(str(shard.layers) for shard in self.shards)
        raise BadSnapshot(
            f"snapshot of run {self.run_id}, step {self.step}: has layers {cuts}, not {layers}; "
            f"host the same stages, or start the run anew"
        )

    def name_of(self, shard: SavedStage) -> ShardName:
        """Return the name of a shard of this snapshot."""
        return ShardName(run_id=self.run_id, step=self.step, layers=shard.layers)

    @classmethod
    def of_run(
        cls, run_id: RunId, spec: RunSpec, step: StepNumber, shards: tuple[SavedStage, ...]
    ) -> Manifest:
        """Return the manifest of a run's state after `step` steps.

        Raises:
            BadSnapshot: The shards' layers do not adjoin, from 0 on.
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
        """Return the manifest as JSON, as the store writes it."""
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
    """Return the manifest that `to_json` wrote.

    Raises:
        BadSnapshot: The text is torn, of another version, or a field is out of its bounds.
    """
    try:
        document = json.loads(data)
        _check_version(_count(document["version"], MAX_STEPS))
        return Manifest(
            run_id=RunId(check_bound("run", document["run"], Name())),
            spec_digest=_digest(document["spec"]),
            step=StepNumber(_count(document["step"], MAX_STEPS)),
            epoch=_count(document["epoch"], MAX_STEPS),
            step_in_epoch=_count(document["step_in_epoch"], MAX_STEPS),
            seed=_count(document["seed"], MAX_SEED),
            shards=tuple(_entry(shard) for shard in document["shards"][: MAX_BLOCKS + 1]),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadSnapshot(f"manifest: swarm-ft did not write it ({error!r:.200})") from error
    except SwarmError as error:
        raise BadSnapshot(f"manifest: {error.message}") from error


def _check_version(version: int) -> None:
    if version > VERSION:
        raise BadSnapshot(
            f"expected version {VERSION}, got {version}, which a later swarm-ft wrote; update "
            "this one"
        )
    check_bound("version", version, Range(VERSION, VERSION))


def _entry(shard: dict[str, Any]) -> SavedStage:
    start, stop = shard["layers"]
    return SavedStage(
        layers=LayerRange(_count(start, MAX_BLOCKS), _count(stop, MAX_BLOCKS)),
        digest=_digest(shard["digest"]),
        total_bytes=_count(shard["bytes"], CHUNK_BYTES * MAX_CHUNKS),
    )


def _count(value: object, high: int) -> int:
    # Python accepts 1.0 and true for the integers that they equal.
    if type(value) is not int:
        raise TypeError(f"expected an integer, got {value!r:.40}")
    return check_bound("number", value, Range(0, high))


def _digest(value: object) -> bytes:
    return check_bound("digest", bytes.fromhex(str(value)), DIGEST)


MANIFEST = "manifest.json"
FORGET_TRIES = 8

logger = get_logger(__name__)


class SnapshotStore:
    """Store of snapshots, see the module's docstring; methods raise `Unavailable` if it fails.

    One process at a time may call `commit` and `prune` for a run; any process may read, and put
    shards of its own layers.
    """

    def __init__(self, url: str) -> None:
        """Open the store; its folder is created at the first shard.

        Args:
            url: A folder, or a url of fsspec, for example `s3://bucket/snapshots`.

        Raises:
            BadOption: fsspec knows no such url, or lacks the package that serves it.
        """
        self._files = StoredFiles(url)
        self._run_folders: dict[RunId, str] = {}

    # ---- writing

    def put_shard(self, name: ShardName, path: Path) -> SavedStage:
        """Move a shard of `write_shard` into the store, or upload and remove it.

        If these layers of this step belong to a snapshot with other bytes, that snapshot is void:
        its steps were repeated.

        Returns:
            The shard's entry for the manifest.
        """
        chunks = chunks_of(path)
        entry = SavedStage(
            layers=name.layers, digest=chunks.digest(), total_bytes=chunks.total_bytes
        )
        earlier = self._manifest(name.run_id, name.step)
        if earlier is not None and entry not in earlier.shards:
            self._files.remove(f"{self._folder(name.run_id, name.step)}/{MANIFEST}")
        self._files.move_in(path, self._shard_path(name))
        return entry

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which makes the shards a snapshot.

        Raises:
            BadSnapshot: A shard is missing or of another size.
        """
        folder = self._folder(manifest.run_id, manifest.step)
        missing = self._missing(manifest)
        if missing:
            raise BadSnapshot(
                f"{self._files.url}/{folder}: expected shards of layers "
                f"{', '.join(map(str, missing))}; put them there first"
            )
        self._files.write(f"{folder}/{MANIFEST}", manifest.to_json())

    def prune(self, run_id: RunId, steps: Collection[StepNumber]) -> None:
        """Remove a run's snapshots but those of these steps, and unfinished ones.

        A folder newer than the newest of these steps stays: it may become a snapshot.
        """
        for step in self._steps(run_id):
            if step < max(steps, default=0) and step not in steps:
                # The manifest goes first: a half-removed snapshot does not count.
                self._files.remove(f"{self._folder(run_id, step)}/{MANIFEST}")
                self._files.remove_folder(self._folder(run_id, step))

    def forget(self, runs: Collection[RunId]) -> None:
        """Remove everything of these runs; other processes may do the same at the same time."""
        folders = {name for run_id in runs for name in _names_of_folder(run_id)}
        for run_id in runs:
            self._run_folders.pop(run_id, None)
        for _ in range(FORGET_TRIES):  # a removal fails if another process removes the same file
            found = folders.intersection(self._files.folders(""))
            if not found:
                return
            for folder in found:
                for step in self._files.folders(folder):  # a half-removed snapshot does not count
                    self._files.remove(f"{folder}/{step}/{MANIFEST}")
                self._files.remove_folder(folder)

    # ---- reading

    def list_snapshots(self, run_id: RunId, spec_digest: bytes) -> tuple[Manifest, ...]:
        """Return the run's whole snapshots of this spec, oldest first."""
        found = (self._whole(run_id, step) for step in self._steps(run_id))
        return tuple(m for m in found if m is not None and m.spec_digest == spec_digest)

    def fetch_shard(self, manifest: Manifest, layers: LayerRange, folder: Path) -> Path:
        """Return a stage's shard as a checked local file: the stored one, or a copy in `folder`.

        The caller may only read it.

        Raises:
            BadSnapshot: The snapshot has no such stage, or its file was altered.
        """
        entry = manifest.shard(layers)
        name = manifest.name_of(entry)
        if self._files.is_local:
            self._check(name, entry, self._files.chunks(self._shard_path(name)))
            return self._files.local_path(self._shard_path(name))
        path = folder / f"fetched-{file_stem(name.run_id)}-{name.step:08}-{name.layers}"
        with atomic_write(path) as partial:
            self._files.copy_out(self._shard_path(name), partial)
            self._check(name, entry, chunks_of(partial))
        return path

    def _check(self, name: ShardName, entry: SavedStage, chunks: ChunkList) -> None:
        if chunks.digest() != entry.digest:
            raise BadSnapshot(
                f"{self._files.url}/{self._shard_path(name)}: its bytes do not match the manifest; "
                f"remove {self._folder(name.run_id, name.step)} to continue from an earlier "
                "snapshot"
            )

    def _run_folder(self, run_id: RunId) -> str:
        """Return the folder that an earlier version made for the run, or today's name for one."""
        if run_id not in self._run_folders:
            today, *earlier = _names_of_folder(run_id)
            found = set(self._files.folders("")).intersection(earlier)
            self._run_folders[run_id] = min(found, default=today)
        return self._run_folders[run_id]

    def _folder(self, run_id: RunId, step: StepNumber) -> str:
        return f"{self._run_folder(run_id)}/step-{step:08}"

    def _shard_path(self, name: ShardName) -> str:
        return f"{self._folder(name.run_id, name.step)}/{_shard_file(name.layers)}"

    def _steps(self, run_id: RunId) -> list[StepNumber]:
        """Return the steps that have a folder, snapshot or not, oldest first."""
        matches = (_STEP.fullmatch(name) for name in self._files.folders(self._run_folder(run_id)))
        return sorted(StepNumber(int(match[1])) for match in matches if match)

    def _whole(self, run_id: RunId, step: StepNumber) -> Manifest | None:
        """Return the step's manifest, if all its shards exist; reads no shard."""
        manifest = self._manifest(run_id, step)
        return None if manifest is None or self._missing(manifest) else manifest

    def _manifest(self, run_id: RunId, step: StepNumber) -> Manifest | None:
        path = f"{self._folder(run_id, step)}/{MANIFEST}"
        data = self._files.read(path, MAX_MANIFEST_BYTES)
        if data is None:
            return None
        try:
            manifest = manifest_from_json(data)
        except BadSnapshot as error:
            logger.warning("%s/%s: %s; ignored", self._files.url, path, error.message)
            return None
        return manifest if (manifest.run_id, manifest.step) == (run_id, step) else None

    def _missing(self, manifest: Manifest) -> list[LayerRange]:
        sizes = self._files.sizes(self._folder(manifest.run_id, manifest.step))
        return [
            shard.layers
            for shard in manifest.shards
            if sizes.get(_shard_file(shard.layers)) != shard.total_bytes
        ]


_STEP = re.compile(r"step-([0-9]{8,10})")


_RUN = re.compile(r"run-[0-9a-f]{32}")


def _names_of_folder(run_id: RunId) -> tuple[str, ...]:
    """Return the names that a run's folder may have, today's first.

    Earlier versions used the run's name. A run's name may look like the digest of another run; then
    it stands for the other run's folder only.
    """
    earlier = quote(run_id, safe="")
    earlier = f"%2E{earlier[1:]}" if earlier.startswith(".") else earlier
    today = f"run-{file_stem(run_id)}"
    return (today,) if _RUN.fullmatch(earlier) else (today, earlier)


def _shard_file(layers: LayerRange) -> str:
    return f"layers-{layers}.safetensors"
