"""A shard reads back as written, or raises an error with a remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm_ft.base.sealing import Sealer, new_key
from swarm_ft.digest import digest_of, file_stem
from swarm_ft.errors import BadSnapshot, Unavailable
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.snapshots.local_files import PLAIN, LocalFiles
from swarm_ft.snapshots.shard import ShardContents, read_shard, write_shard

from .conftest import CUTS, SPEC, contents, shard_name

NAME = shard_name(42, CUTS[1])


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one
    )


@pytest.mark.parametrize(
    "what",
    [contents(3), ShardContents(state={"w": torch.zeros(0, 4)}), ShardContents(state={})],
    ids=["full", "without extras", "empty"],
)
def test_what_was_written_is_read(tmp_path: Path, what: ShardContents) -> None:
    path = write_shard(tmp_path, NAME, SPEC, what)
    read = read_shard(path, NAME, SPEC)
    assert same(read.state, what.state)
    assert same(read.extras, what.extras)
    assert read.buffer_digests == what.buffer_digests


@pytest.mark.parametrize("has_memory_files", [True, False], ids=["linux", "others"])
def test_a_sealed_shard_is_read_by_who_has_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory_files: bool
) -> None:
    if not has_memory_files:
        monkeypatch.delattr(os, "memfd_create")
    key = new_key()
    files = LocalFiles(Sealer(key, "files"), seals=True)
    path = write_shard(tmp_path, NAME, SPEC, contents(3), files)
    read = read_shard(path, NAME, SPEC, files)
    assert same(read.state, contents(3).state)
    assert same(read.extras, contents(3).extras)
    assert read.buffer_digests == contents(3).buffer_digests
    for other in (PLAIN, LocalFiles(Sealer(new_key(), "files"), seals=True)):
        with pytest.raises(BadSnapshot):
            read_shard(path, NAME, SPEC, other)


@pytest.mark.parametrize("has_memory_files", [True, False], ids=["linux", "others"])
@pytest.mark.parametrize("data", [b"", b"nonsense", b"\xff" * 64])
def test_a_sealed_file_that_holds_no_shard_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory_files: bool, data: bytes
) -> None:
    if not has_memory_files:
        monkeypatch.delattr(os, "memfd_create")
    files = LocalFiles(Sealer(new_key(), "files"), seals=True)
    files.write(tmp_path / "shard", data)
    with pytest.raises(BadSnapshot):
        read_shard(tmp_path / "shard", NAME, SPEC, files)


def test_weights_are_found_under_their_own_names_by_any_reader(tmp_path: Path) -> None:
    path = write_shard(tmp_path, NAME, SPEC, contents(3))
    assert torch.equal(load_file(path)["h.0.weight"], contents(3).state["h.0.weight"])


def test_equal_contents_make_equal_files(tmp_path: Path) -> None:
    one = write_shard(tmp_path, NAME, SPEC, contents(3))
    (tmp_path / "other").mkdir()
    what = contents(3)
    turned = ShardContents(
        state=dict(reversed(list(what.state.items()))),
        extras=dict(reversed(list(what.extras.items()))),
        buffer_digests=dict(reversed(list(what.buffer_digests.items()))),
    )
    other = write_shard(tmp_path / "other", NAME, SPEC, turned)
    assert one.read_bytes() == other.read_bytes()


def test_shards_of_several_steps_and_stages_lie_side_by_side(tmp_path: Path) -> None:
    names = [shard_name(step, layers) for step in (1, 2) for layers in CUTS]
    paths = [write_shard(tmp_path, name, SPEC, contents(i)) for i, name in enumerate(names)]
    for i, (name, path) in enumerate(zip(names, paths, strict=True)):
        assert same(read_shard(path, name, SPEC).state, contents(i).state)
    assert sorted(tmp_path.iterdir()) == sorted(paths)


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 500, -1])
def test_a_truncated_shard_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = write_shard(tmp_path, NAME, SPEC, contents(3))
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(BadSnapshot, match="take it from another peer, or an earlier snapshot"):
        read_shard(path, NAME, SPEC)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSnapshot, match="not a whole safetensors file"):
        read_shard(tmp_path / "none.safetensors", NAME, SPEC)


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write_shard(tmp_path, NAME, SPEC, contents(3))
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    # Blanks that pad the header mean nothing to safetensors; every other change matters.
    content = len(whole[:header_bytes].rstrip(b" "))
    for place in (*range(0, content, 3), content - 1, *range(header_bytes, len(whole), 97)):
        altered = bytearray(whole)
        altered[place] ^= 1 << place % 8
        path.write_bytes(altered)
        with pytest.raises(BadSnapshot):
            read_shard(path, NAME, SPEC)


OTHERS = {
    "run": (shard_name(42, CUTS[1], run="run-2"), SPEC, "expected run run-2, got 'run-1'"),
    "spec": (NAME, bytes(16), "expected spec 0000"),
    "layers": (shard_name(42, LayerRange(12, 23)), SPEC, "expected layers 12-23, got '12-24'"),
    "step": (shard_name(41, CUTS[1]), SPEC, "expected step 41, got 42"),
}


@pytest.mark.parametrize(("name", "spec", "match"), OTHERS.values(), ids=OTHERS)
def test_a_shard_of_another_run_or_stage_or_step_is_refused(
    tmp_path: Path, name: ShardName, spec: bytes, match: str
) -> None:
    path = write_shard(tmp_path, NAME, SPEC, contents(3))
    with pytest.raises(BadSnapshot, match=match) as caught:
        read_shard(path, name, spec)
    assert "name the snapshot of this run and stage" in caught.value.message


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"swarm_ft": "{"},
        {"swarm_ft": "[]"},
        {"swarm_ft": "{}"},
        {"swarm_ft": "[" * 100_000},
    ],
)
def test_another_safetensors_file_is_no_shard(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "file", metadata=metadata)
    with pytest.raises(BadSnapshot, match="not a shard of a snapshot"):
        read_shard(tmp_path / "file", NAME, SPEC)


def document_of(path: Path) -> dict[str, object]:
    """Return a shard's metadata."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    document: dict[str, object] = json.loads(header["__metadata__"]["swarm_ft"])
    return document


def seal(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write these tensors into a shard with a right digest."""
    document = document_of(path)
    del document["digest"]
    digests = (
        digest_of(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), tensor.numpy().tobytes())
        for name, tensor in sorted(tensors.items())
    )
    document["digest"] = digest_of(json.dumps(document).encode(), *digests).hex()
    save_file(tensors, path, metadata={"swarm_ft": json.dumps(document)})


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"buffers/names": torch.zeros(2, 3, dtype=torch.int64)},
        {
            "buffers/names": torch.zeros(2, 3, dtype=torch.int64),
            "buffers/digests": torch.zeros(1, 16, dtype=torch.uint8),
        },
        {
            "buffers/names": torch.zeros(2, 3),
            "buffers/digests": torch.zeros(2, 16, dtype=torch.uint8),
        },
    ],
)
def test_a_sealed_shard_with_a_table_of_nonsense_is_refused(
    tmp_path: Path, table: dict[str, torch.Tensor]
) -> None:
    """A liar can seal anything: the seal detects accidents, the coordinator's digest lies."""
    path = write_shard(tmp_path, NAME, SPEC, contents(3))
    seal(path, {**contents(3).state, **table})
    with pytest.raises(BadSnapshot, match="expected a table of buffers"):
        read_shard(path, NAME, SPEC)


def test_the_seal_covers_what_the_shard_says_of_itself(tmp_path: Path) -> None:
    path = write_shard(tmp_path, NAME, SPEC, contents(3))
    tensors = load_file(path)
    document = document_of(path)
    save_file(tensors, path, metadata={"swarm_ft": json.dumps({**document, "step": 43})})
    with pytest.raises(BadSnapshot, match="tensors were altered"):
        read_shard(path, shard_name(43, CUTS[1]), SPEC)


def test_a_disk_that_does_not_take_it_is_told_and_left_clean(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be written"):
        write_shard(tmp_path / "no such folder", NAME, SPEC, contents(3))
    (tmp_path / f"run-{file_stem(NAME.run_id)}-step-00000042-layers-12-24.safetensors").mkdir()
    with pytest.raises(Unavailable, match="cannot be written"):
        write_shard(tmp_path, NAME, SPEC, contents(3))
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
