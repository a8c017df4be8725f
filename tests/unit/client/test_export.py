from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swarm_ft.client.demo_input import DemoInput
from swarm_ft.client.export import MANIFEST, assemble, check_out_dir, shard_dir
from swarm_ft.errors import BadOption, ProtocolError


def _write_config_of(sample: DemoInput) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        AutoConfig.from_pretrained(sample.model_dir).save_pretrained(directory)
        AutoTokenizer.from_pretrained(sample.model_dir).save_pretrained(directory)

    return write


def _shards(sample: DemoInput, directory: Path, count: int) -> list[Path]:
    tensors = load_file(Path(sample.model_dir) / "model.safetensors")
    names = sorted(tensors)
    paths = [directory / f"stage-{i}.safetensors" for i in range(count)]
    for i, path in enumerate(paths):
        save_file({n: tensors[n] for n in names[i::count]}, path, metadata={"format": "pt"})
    return paths


def _names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


@pytest.mark.parametrize("count", [1, 3])
def test_transformers_loads_what_the_stages_wrote(
    sample: DemoInput, tmp_path: Path, count: int
) -> None:
    out = tmp_path / "deep" / "out"
    with shard_dir(out) as collected:
        assemble(out, _shards(sample, collected, count), _write_config_of(sample))
    assert _names(out.parent) == {"out"}
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = AutoModelForCausalLM.from_pretrained(sample.model_dir).state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(out).vocab_size == 512


def test_what_a_collection_that_was_killed_left_there_is_gone_on_from(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with shard_dir(out) as collected:
        left = collected / "half.partial"
    left.parent.mkdir()
    left.write_bytes(b"half")
    with shard_dir(out) as collected:
        assert _names(collected) == {"half.partial"}
    assert _names(tmp_path) == set()


def test_several_shards_get_an_index_with_every_tensor_and_the_size(
    sample: DemoInput, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assemble(out, _shards(sample, tmp_path, 2), _write_config_of(sample))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = load_file(Path(sample.model_dir) / "model.safetensors")
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_a_single_shard_needs_no_index(sample: DemoInput, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assemble(out, _shards(sample, tmp_path, 1), _write_config_of(sample))
    assert "model.safetensors" in _names(out)
    assert "model.safetensors.index.json" not in _names(out)


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("count", [1, 3])
def test_shards_are_joined_to_one_file(sample: DemoInput, tmp_path: Path, count: int) -> None:
    shards = _shards(sample, tmp_path, count)
    save_file({}, tmp_path / "empty.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    shards.insert(1, tmp_path / "empty.safetensors")
    assemble(out, shards, lambda _directory: None, as_one="adapter.safetensors")
    assert _names(out) == {"adapter.safetensors", MANIFEST}
    joined = load_file(out / "adapter.safetensors")
    expected = load_file(Path(sample.model_dir) / "model.safetensors")
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in expected.items())
    with safe_open(out / "adapter.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_in_two_shards_is_not_joined(sample: DemoInput, tmp_path: Path) -> None:
    (shard,) = _shards(sample, tmp_path, 1)
    with pytest.raises(ProtocolError, match="came from two stages"):
        assemble(
            tmp_path / "out", [shard, shard], lambda _directory: None, as_one="one.safetensors"
        )
    assert not (tmp_path / "out").exists()


def test_an_export_is_readable_by_its_owner_alone(sample: DemoInput, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shards = _shards(sample, tmp_path, 1)
    shards[0].chmod(0o644)
    assemble(out, shards, _write_config_of(sample))
    assert out.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert {"model.safetensors", "config.json", MANIFEST} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_a_tensor_in_two_shards_is_refused_and_leaves_nothing(
    sample: DemoInput, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    shard = _shards(sample, tmp_path, 1)[0]
    with pytest.raises(ProtocolError, match="came from two stages"):
        assemble(out, [shard, shard], _write_config_of(sample))
    assert _names(out.parent) == set()


def test_a_shard_that_is_no_safetensors_file_is_refused(sample: DemoInput, tmp_path: Path) -> None:
    bad = tmp_path / "stage-0.safetensors"
    bad.write_bytes(b"\xff" * 64)
    with pytest.raises(ProtocolError, match="not a safetensors file"):
        assemble(tmp_path / "out", [bad], _write_config_of(sample))
    with pytest.raises(ProtocolError, match="got none"):
        assemble(tmp_path / "out", [], _write_config_of(sample))
    assert _names(tmp_path) == {bad.name}


def test_an_interrupted_export_leaves_the_earlier_one_whole(
    sample: DemoInput, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shards = _shards(sample, tmp_path, 1)
    assemble(out, shards, _write_config_of(sample))
    before = {entry.name: entry.read_bytes() for entry in out.iterdir()}

    def interrupt(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assemble(out, shards, interrupt)
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == before
    assert _names(tmp_path) == {"out", shards[0].name}


def test_an_earlier_export_is_replaced_as_a_whole(sample: DemoInput, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assemble(out, _shards(sample, tmp_path, 3), _write_config_of(sample))
    assemble(out, _shards(sample, tmp_path, 1), _write_config_of(sample))
    assert "model-00001-of-00003.safetensors" not in _names(out)
    assert set(json.loads((out / MANIFEST).read_text())["files"]) == _names(out) - {MANIFEST}
    AutoModelForCausalLM.from_pretrained(out)


def test_remains_of_a_killed_export_do_no_harm(sample: DemoInput, tmp_path: Path) -> None:
    (tmp_path / ".out.swarm-ft-partial").mkdir()
    (tmp_path / ".out.swarm-ft-partial" / "junk").touch()
    out = tmp_path / "out"
    assemble(out, _shards(sample, tmp_path, 1), _write_config_of(sample))
    assert "junk" not in _names(out)


def test_new_and_empty_directories_may_be_written(tmp_path: Path) -> None:
    check_out_dir(tmp_path)
    check_out_dir(tmp_path / "not" / "there" / "yet")
    assert _names(tmp_path) == set()


def test_a_file_is_no_output_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadOption, match="expected a directory, found a file"):
        check_out_dir(tmp_path / "file")
    with pytest.raises(BadOption, match="is not a directory"):
        check_out_dir(tmp_path / "file" / "below")


def test_other_peoples_files_are_never_replaced(sample: DemoInput, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").touch()
    with pytest.raises(BadOption, match=r"thesis\.txt"):
        check_out_dir(out)
    (out / "thesis.txt").unlink()
    assemble(out, _shards(sample, tmp_path, 1), _write_config_of(sample))
    check_out_dir(out)
    (out / "notes.txt").touch()
    with pytest.raises(BadOption, match=r"notes\.txt"):
        check_out_dir(out)


@pytest.mark.parametrize("manifest", ["", "[]", '{"files": 3}', '{"files": [3]}', "\x00"])
def test_a_manifest_that_is_not_ours_vouches_for_nothing(tmp_path: Path, manifest: str) -> None:
    (tmp_path / MANIFEST).write_text(manifest)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BadOption):
        check_out_dir(tmp_path)


def test_a_mount_point_is_refused() -> None:
    with pytest.raises(BadOption, match="mount point"):
        check_out_dir(Path("/"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadOption, match="no permission"):
        check_out_dir(tmp_path / "out")
