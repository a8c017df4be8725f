"""A snapshot exists when its manifest does, in a folder and elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from swarm_ft.base.sealing import Sealer
from swarm_ft.digest import file_stem
from swarm_ft.errors import BadOption, BadSnapshot, Unavailable
from swarm_ft.ids import RunId, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.snapshots.local_files import LocalFiles
from swarm_ft.snapshots.shard import read_shard, write_shard
from swarm_ft.snapshots.store import SnapshotStore, manifest_from_json
from tests.states import state_digest

from .conftest import (
    CUTS,
    SPEC,
    SaveSnapshot,
    check_whole,
    contents,
    latest_of,
    manifest_of,
    shard_name,
)

RUN = RunId("run-1")
FOLDER = f"run-{file_stem(RUN)}"


class Place:
    """A store, and a way to meddle with its files."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SnapshotStore(url)
        self.fs, self.root = fsspec.core.url_to_fs(url)

    def files(self) -> list[str]:
        return sorted(path.removeprefix(f"{self.root}/") for path in self.fs.find(self.root))

    def alter(self, path: str, change: Callable[[bytes], bytes]) -> None:
        path = f"{self.root}/{path}"
        self.fs.pipe_file(path, change(self.fs.cat_file(path)))

    def remove(self, path: str) -> None:
        self.fs.rm(f"{self.root}/{path}", recursive=True)


@pytest.fixture(params=["folder", "file url", "elsewhere"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    urls = {
        "folder": str(tmp_path / "snapshots"),
        "file url": f"file://{tmp_path}/snapshots",
        "elsewhere": "memory://bucket/snapshots",
    }
    made = Place(urls[request.param])
    yield made
    if made.fs.exists(made.root):
        made.fs.rm(made.root, recursive=True)


def steps(store: SnapshotStore, run: RunId = RUN) -> list[StepNumber]:
    return [manifest.step for manifest in store.list_snapshots(run, SPEC)]


def test_files_lie_where_the_docs_say(place: Place, save: SaveSnapshot) -> None:
    save(place.store, 42)
    assert place.files() == [
        f"{FOLDER}/step-00000042/layers-0-12.safetensors",
        f"{FOLDER}/step-00000042/layers-12-24.safetensors",
        f"{FOLDER}/step-00000042/manifest.json",
    ]


def test_a_snapshot_is_found_as_it_was_committed(
    place: Place, save: SaveSnapshot, tmp_path: Path
) -> None:
    made = [save(place.store, step) for step in (2, 7, 100_000_000)]
    reopened = SnapshotStore(place.url)
    assert reopened.list_snapshots(RUN, SPEC) == tuple(made)
    assert latest_of(reopened) == made[-1]
    check_whole(reopened, made[0], tmp_path)
    path = reopened.fetch_shard(made[1], CUTS[1], tmp_path)
    read = read_shard(path, shard_name(7, CUTS[1]), SPEC)
    assert read.buffer_digests == contents(7).buffer_digests


def test_a_manifest_is_readable_json(place: Place, save: SaveSnapshot) -> None:
    made = save(place.store, 7)
    data = place.fs.cat_file(f"{place.root}/{FOLDER}/step-00000007/manifest.json")
    assert manifest_from_json(data) == made
    document = json.loads(data)
    entry = document["shards"][1]
    assert (entry["layers"], entry["digest"]) == ([12, 24], made.shards[1].digest.hex())
    position = {key: document[key] for key in ("step", "epoch", "step_in_epoch", "seed")}
    assert position == {"step": 7, "epoch": 2, "step_in_epoch": 1, "seed": 11}


def test_nothing_is_there_before_anything_was_put(place: Place) -> None:
    assert place.store.list_snapshots(RUN, SPEC) == ()
    assert latest_of(place.store) is None
    place.store.prune(RUN, [StepNumber(3)])


def test_a_shard_is_moved_in_not_copied(place: Place, tmp_path: Path) -> None:
    path = write_shard(tmp_path, shard_name(1), SPEC, contents(1))
    size = path.stat().st_size
    entry = place.store.put_shard(shard_name(1), path)
    assert (entry.total_bytes, entry.layers) == (size, CUTS[0])
    assert not path.exists()


def test_shards_without_a_manifest_are_no_snapshot(
    place: Place, save: SaveSnapshot, tmp_path: Path
) -> None:
    save(place.store, 1)
    name = shard_name(2)
    entry = place.store.put_shard(name, write_shard(tmp_path, name, SPEC, contents(2)))
    assert steps(place.store) == [1]
    place.store.commit(manifest_of(name, [entry]))
    assert steps(place.store) == [1, 2]


def test_a_manifest_waits_for_its_shards(place: Place, tmp_path: Path) -> None:
    name = shard_name(2)
    entry = place.store.put_shard(name, write_shard(tmp_path, name, SPEC, contents(2)))
    place.remove(f"{FOLDER}/step-00000002")
    with pytest.raises(BadSnapshot, match="expected shards of layers 0-12; put them there first"):
        place.store.commit(manifest_of(name, [entry]))
    assert latest_of(place.store) is None


TEARS: dict[str, Callable[[Place, str], None]] = {
    "no manifest": lambda place, folder: place.remove(f"{folder}/manifest.json"),
    "half a manifest": lambda place, folder: place.alter(
        f"{folder}/manifest.json", lambda data: data[: len(data) // 2]
    ),
    "an empty manifest": lambda place, folder: place.alter(
        f"{folder}/manifest.json", lambda data: b""
    ),
    "no shard": lambda place, folder: place.remove(f"{folder}/layers-12-24.safetensors"),
    "half a shard": lambda place, folder: place.alter(
        f"{folder}/layers-0-12.safetensors", lambda data: data[:-1]
    ),
    "another step's manifest": lambda place, folder: place.alter(
        f"{folder}/manifest.json", lambda data: data.replace(b'"step": 7', b'"step": 8')
    ),
}


@pytest.mark.parametrize("tear", TEARS.values(), ids=TEARS)
def test_a_torn_snapshot_is_none_and_the_one_before_it_counts(
    place: Place, save: SaveSnapshot, tear: Callable[[Place, str], None]
) -> None:
    for step in (3, 7):
        save(place.store, step)
    tear(place, f"{FOLDER}/step-00000007")
    assert steps(place.store) == [3]
    latest = latest_of(place.store)
    assert latest is not None
    assert latest.step == 3
    place.store.prune(RUN, [StepNumber(3)])
    assert steps(place.store) == [3]
    assert save(place.store, 7) == latest_of(place.store)


def test_runs_and_specs_are_kept_apart(place: Place, save: SaveSnapshot) -> None:
    for run, step in (("run-1", 5), ("run-2", 9), ("..", 3), ("a b*?[x]", 4)):
        save(place.store, step, run=run)
    assert steps(place.store, RUN) == [5]
    assert steps(place.store, RunId("..")) == [3]
    assert steps(place.store, RunId("a b*?[x]")) == [4]
    assert steps(place.store, RunId("*")) == []
    assert place.store.list_snapshots(RUN, bytes(16)) == ()
    place.store.prune(RunId(".."), [StepNumber(3)])
    assert len(place.files()) == 4 * 3


@pytest.mark.parametrize(
    ("saved", "expected", "left"),
    [
        ([3], [3], [3]),
        ([3, 5], [3, 5], [3, 5]),
        ([3, 5, 7, 9], [7, 9], [7, 9]),
        ([3, 5, 7, 9], [3, 9], [3, 9]),
        ([3, 5, 7, 9], [5, 7], [5, 7, 9]),
        ([3, 5], [], [3, 5]),
    ],
)
def test_prune_keeps_what_it_is_told_to_and_what_is_newer(
    place: Place,
    save: SaveSnapshot,
    tmp_path: Path,
    saved: list[int],
    expected: list[int],
    left: list[int],
) -> None:
    for step in saved:
        save(place.store, step)
    place.store.prune(RUN, list(map(StepNumber, expected)))
    assert steps(place.store) == left
    assert len(place.files()) == 3 * len(left)
    for manifest in place.store.list_snapshots(RUN, SPEC):
        check_whole(place.store, manifest, tmp_path)


def test_prune_removes_what_never_became_a_snapshot_but_not_what_may_become_one(
    place: Place, save: SaveSnapshot, tmp_path: Path
) -> None:
    for step in (1, 5):
        name = shard_name(step)
        place.store.put_shard(name, write_shard(tmp_path, name, SPEC, contents(step)))
    place.store.prune(RUN, [])
    assert len(place.files()) == 2
    save(place.store, 3)
    place.store.prune(RUN, [StepNumber(3)])
    assert {path.split("/")[1] for path in place.files()} == {"step-00000003", "step-00000005"}


def test_a_run_is_forgotten_and_no_other(place: Place, save: SaveSnapshot, tmp_path: Path) -> None:
    other = RunId("run-10")
    save(place.store, 3)
    save(place.store, 4, other)
    unfinished = shard_name(5)
    place.store.put_shard(unfinished, write_shard(tmp_path, unfinished, SPEC, contents(5)))
    place.store.forget([RUN])
    place.store.forget([RUN])
    assert {path.split("/")[0] for path in place.files()} == {f"run-{file_stem(other)}"}


def test_an_altered_shard_is_told_with_what_to_do(
    place: Place, save: SaveSnapshot, tmp_path: Path
) -> None:
    manifest = save(place.store, 7)
    place.alter(
        f"{FOLDER}/step-00000007/layers-12-24.safetensors",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    )
    with pytest.raises(BadSnapshot, match=f"remove {FOLDER}/step-00000007 to continue"):
        place.store.fetch_shard(manifest, CUTS[1], tmp_path)
    place.store.fetch_shard(manifest, CUTS[0], tmp_path)
    assert [path for path in tmp_path.iterdir() if path.suffix == ".partial"] == []


def test_a_stage_that_the_snapshot_does_not_have_is_refused(
    place: Place, save: SaveSnapshot, tmp_path: Path
) -> None:
    manifest = save(place.store, 7)
    with pytest.raises(BadSnapshot, match="has layers 0-12, 12-24, not 0-24"):
        place.store.fetch_shard(manifest, LayerRange(0, 24), tmp_path)


def test_a_step_that_was_redone_to_other_bits_is_another_snapshot(
    place: Place, save: SaveSnapshot, tmp_path: Path
) -> None:
    """Its shards arrive one after the other; no snapshot may mix old and new ones."""
    save(place.store, 3)
    save(place.store, 7)
    name = shard_name(7)
    place.store.put_shard(name, write_shard(tmp_path, name, SPEC, contents(99)))
    assert steps(place.store) == [3]
    manifest = save(place.store, 7, seed=99)
    check_whole(place.store, manifest, tmp_path)
    assert steps(place.store) == [3, 7]


def test_a_step_that_was_redone_to_the_same_bits_is_the_same_snapshot(
    place: Place, save: SaveSnapshot, tmp_path: Path
) -> None:
    manifest = save(place.store, 7)
    name = shard_name(7)
    place.store.put_shard(name, write_shard(tmp_path, name, SPEC, contents(7)))
    assert latest_of(place.store) == manifest
    check_whole(place.store, manifest, tmp_path)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = SnapshotStore(str(tmp_path / "file"))
    path = write_shard(tmp_path, shard_name(1), SPEC, contents(1))
    with pytest.raises(Unavailable, match=f"snapshots at '{tmp_path}/file'"):
        store.put_shard(shard_name(1), path)
    assert path.exists()


@pytest.mark.parametrize("url", ["no-such-scheme://bucket", "gdrive://x"])
def test_a_url_that_nobody_serves_is_refused_at_once(url: str) -> None:
    with pytest.raises(BadOption, match="snapshots at"):
        SnapshotStore(url)


def modes_below(root: Path) -> tuple[set[int], set[int]]:
    """Return the modes of all folders and of all files, the root too."""
    paths = [root, *root.rglob("*")]
    folders = {path.stat().st_mode & 0o777 for path in paths if path.is_dir()}
    return folders, {path.stat().st_mode & 0o777 for path in paths if path.is_file()}


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("before", [None, 0o755])
def test_only_their_owner_reads_snapshots(
    tmp_path: Path, save: SaveSnapshot, before: int | None
) -> None:
    root = tmp_path / "deep" / "snapshots"
    if before is not None:
        root.mkdir(mode=before, parents=True)
    save(SnapshotStore(str(root)), 1)
    assert modes_below(root) == ({0o700}, {0o600})


@pytest.mark.parametrize("umask", [0, 0o077])
def test_a_folder_that_a_group_shares_stays_shared(
    tmp_path: Path, save: SaveSnapshot, umask: int, no_umask: None
) -> None:
    root = tmp_path / "snapshots"
    root.mkdir()
    root.chmod(0o770)
    os.umask(umask)
    save(SnapshotStore(str(root)), 1)
    assert modes_below(root) == ({0o770}, {0o660})


def altered_json(**changes: Any) -> Callable[[dict[str, Any]], object]:
    def change(document: dict[str, Any]) -> dict[str, Any]:
        return {**document, **changes}

    return change


ENTRY = {"layers": [0, 12], "digest": "00" * 16, "bytes": 10}
NONSENSE: dict[str, Callable[[dict[str, Any]], object]] = {
    "not an object": lambda _: [],
    "another version": altered_json(version=2),
    "a version that is true": altered_json(version=True),
    "no run": altered_json(run=""),
    "a run with a slash": altered_json(run="../x"),
    "a run that is no text": altered_json(run=7),
    "half a digest": altered_json(spec="00"),
    "a digest that is no hex": altered_json(spec="zz" * 16),
    "a step of 1.0": altered_json(step=1.0),
    "a negative step": altered_json(step=-1),
    "an endless step": altered_json(step=1 << 40),
    "no shards": altered_json(shards=[]),
    "shards that are none": altered_json(shards=[7]),
    "a hole between the layers": altered_json(shards=[ENTRY, {**ENTRY, "layers": [13, 24]}]),
    "layers that overlap": altered_json(shards=[ENTRY, ENTRY]),
    "layers from 1 on": altered_json(shards=[{**ENTRY, "layers": [1, 12]}]),
    "layers in reverse": altered_json(shards=[{**ENTRY, "layers": [12, 0]}]),
    "three layers": altered_json(shards=[{**ENTRY, "layers": [0, 1, 2]}]),
    "negative bytes": altered_json(shards=[{**ENTRY, "bytes": -1}]),
}


@pytest.mark.parametrize("change", NONSENSE.values(), ids=NONSENSE)
def test_a_manifest_of_nonsense_is_refused(
    tmp_path: Path, save: SaveSnapshot, change: Callable[[bytes], bytes]
) -> None:
    document = json.loads(save(SnapshotStore(str(tmp_path / "s")), 7).to_json())
    with pytest.raises(BadSnapshot):
        manifest_from_json(json.dumps(change(document)).encode())


def test_a_manifest_of_a_later_version_is_refused_with_what_to_do(
    tmp_path: Path, save: SaveSnapshot
) -> None:
    document = json.loads(save(SnapshotStore(str(tmp_path / "s")), 7).to_json())
    words = "manifest: expected version 1, got 2, which a later swarm-ft wrote; update this one"
    with pytest.raises(BadSnapshot, match=words):
        manifest_from_json(json.dumps(document | {"version": 2}).encode())


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b"NaN"])
def test_what_is_no_json_is_no_manifest(data: bytes) -> None:
    with pytest.raises(BadSnapshot):
        manifest_from_json(data)


@pytest.mark.parametrize("name", ["run-1", ".hidden", ".."])
def test_all_of_a_run_is_forgotten_and_others_stay(
    place: Place, save: SaveSnapshot, name: str
) -> None:
    for step in (3, 7):
        save(place.store, step, name)
    other = save(place.store, 7, "run-2")
    place.store.forget([RunId(name), RunId("never heard of")])
    assert place.store.list_snapshots(RunId(name), SPEC) == ()
    assert place.store.list_snapshots(RunId("run-2"), SPEC) == (other,)
    place.store.forget([RunId(name)])


def test_several_may_forget_a_run_at_once(tmp_path: Path, save: SaveSnapshot) -> None:
    stores = [SnapshotStore(str(tmp_path / "snapshots")) for _ in range(4)]
    for step in range(40):
        save(stores[0], step)
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(lambda store: store.forget([RunId("run-1")]), stores))
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_a_sealed_stage_is_one_of_a_snapshot_as_others_are(place: Place, tmp_path: Path) -> None:
    files = LocalFiles(Sealer(bytes(32), "files"), seals=True)
    name = shard_name(7, LayerRange(0, 24))
    path = write_shard(tmp_path, name, SPEC, contents(7), files)
    manifest = manifest_of(name, [place.store.put_shard(name, path)])
    place.store.commit(manifest)
    found = place.store.fetch_shard(manifest, name.layers, tmp_path)
    read = read_shard(found, name, SPEC, files)
    assert state_digest(read.state) == state_digest(contents(7).state)
    with pytest.raises(BadSnapshot, match="encrypted, and this process has no key"):
        read_shard(found, name, SPEC)


@pytest.mark.parametrize("name", ["run-1", ".hidden", "..", "\N{OCTOPUS}" * 16, "a" * 64, "%" * 64])
def test_no_name_of_a_run_becomes_a_path(place: Place, save: SaveSnapshot, name: str) -> None:
    save(place.store, 7, name)
    assert steps(place.store, RunId(name)) == [7]
    assert {path.partition("/")[0] for path in place.files()} == {f"run-{file_stem(name)}"}


@pytest.mark.parametrize(("name", "folder"), [("run-1", "run-1"), ("..", "%2E."), ("a b", "a%20b")])
def test_a_run_that_an_earlier_version_began_keeps_its_folder(
    place: Place, save: SaveSnapshot, name: str, folder: str
) -> None:
    run = RunId(name)
    save(place.store, 7, name)
    place.fs.mv(f"{place.root}/run-{file_stem(name)}", f"{place.root}/{folder}", recursive=True)
    reopened = SnapshotStore(place.url)
    assert steps(reopened, run) == [7]
    save(reopened, 9, name)
    assert steps(SnapshotStore(place.url), run) == [7, 9]
    assert {path.partition("/")[0] for path in place.files()} == {folder}
    reopened.forget([run])
    assert place.files() == []


def test_a_run_that_is_named_like_the_folder_of_another_run_touches_nothing_there(
    place: Place, save: SaveSnapshot
) -> None:
    made = save(place.store, 7)
    imitator = RunId(FOLDER)
    store = SnapshotStore(place.url)
    assert steps(store, imitator) == []
    save(store, 8, imitator)
    store.prune(imitator, [StepNumber(9)])
    store.forget([imitator])
    assert place.store.list_snapshots(RUN, SPEC) == (made,)
    assert steps(place.store) == [7]
