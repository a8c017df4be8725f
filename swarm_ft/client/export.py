"""Assembly of stage shards into one Hugging Face checkpoint. Knows files, not tensor values.

An exported directory holds `swarm_ft_export.json`, the list of its files. A later export replaces
only such a directory, and only if it holds no other files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from swarm_ft.base.private_files import FOLDER_MODE, make_private
from swarm_ft.errors import BadOption, ProtocolError

MANIFEST = "swarm_ft_export.json"
_HEADER_LENGTH_BYTES = 8


def assemble(
    out_dir: Path,
    shards: Sequence[Path],
    write_config: Callable[[Path], None],
    *,
    as_one: str | None = None,
) -> None:
    """Build the checkpoint beside `out_dir` and rename it into place as the last act.

    Only its owner can read it, because the training text may be private.

    After any interruption `out_dir` is either unchanged or complete. One exception: a kill between
    the two renames that replace an earlier export leaves that export as `.NAME.swarm-ft-earlier`.
    Shards may lie outside `out_dir`, best in `shard_dir`; they are hard-linked where the file
    system allows it, and copied elsewhere.

    Args:
        out_dir: Target directory, accepted by `check_out_dir`; an earlier export is replaced.
        shards: Safetensors files with Hugging Face tensor names, first stage to last.
        write_config: Function that writes config and tokenizer into a given directory.
        as_one: Name of one file for all tensors; None writes one file for each shard.

    Raises:
        BadOption: `out_dir` may not be used.
        ProtocolError: A shard is not a safetensors file, or two shards have the same tensor.
    """
    check_out_dir(out_dir)
    out_dir = out_dir.resolve()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = _fresh_dir(_sibling(out_dir, "partial"))
    try:
        if as_one is None:
            _place_weights(partial, shards)
        else:
            _join(partial / as_one, shards)
        write_config(partial)
        _write_manifest(partial)
        for file in partial.rglob("*"):
            make_private(file)
        _rename_into_place(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def shard_dir(out_dir: Path) -> Iterator[Path]:
    """Create a directory for shards beside `out_dir`, and delete it at the end of the context.

    The directory may hold files of an earlier fetch that was killed.
    """
    out_dir = out_dir.resolve()
    directory = _sibling(out_dir, "shards")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def check_out_dir(path: Path) -> None:
    """Refuse an output directory that could not be written, or whose files would be lost.

    Raises:
        BadOption: The path is a file, a mount point, or a directory with foreign files; or its
            parent
            is not writable.
    """
    path = path.resolve()
    if path.is_dir():
        _check_replaceable(path)
    elif path.exists():
        raise BadOption(f"--out '{path}': expected a directory, found a file")
    holder = next(parent for parent in path.parents if parent.exists())
    if not holder.is_dir():
        raise BadOption(f"--out '{path}': '{holder}' is not a directory")
    if not os.access(holder, os.W_OK | os.X_OK):
        raise BadOption(f"--out '{path}': no permission to write in '{holder}'")


def _check_replaceable(path: Path) -> None:
    if os.path.ismount(path):
        raise BadOption(f"--out '{path}': is a mount point; name a directory inside it")
    try:
        found = {entry.name for entry in path.iterdir()}
    except OSError as exc:
        raise BadOption(f"--out '{path}': cannot be read: {exc.strerror}") from exc
    foreign = sorted(found - _manifest_names(path))
    if foreign:
        raise BadOption(
            f"--out '{path}': expected a new or empty directory or an earlier export, found "
            f"'{foreign[0]}'; name another directory"
        )


def _manifest_names(path: Path) -> set[str]:
    """Return the files that an export wrote into `path`; an empty set if it is not an export."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    names = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(names, list):
        return set()
    return {MANIFEST, *(name for name in names if isinstance(name, str))}


def _place_weights(directory: Path, shards: Sequence[Path]) -> None:
    """Place the shards under Hugging Face's names, with an index if there are several."""
    count = len(shards)
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    files = files if count > 1 else ["model.safetensors"]
    weight_map = _weight_map(shards, files)
    for shard, file in zip(shards, files, strict=True):
        _link_or_copy(shard, directory / file)
    if count > 1:
        total_bytes = sum(shard.stat().st_size - _data_start(shard) for shard in shards)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)


def _join(target: Path, shards: Sequence[Path]) -> None:
    """Write one safetensors file with the tensors of all shards."""
    _weight_map(shards, [shard.name for shard in shards])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for shard in shards:
        start = _data_start(shard)
        with shard.open("rb") as file:
            own = json.loads(file.read(start)[_HEADER_LENGTH_BYTES:])
        own.pop("__metadata__", None)
        for name, tensor in own.items():
            moved = [place + offset for place in tensor["data_offsets"]]
            header[name] = {**tensor, "data_offsets": moved}
        offset += shard.stat().st_size - start
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_LENGTH_BYTES)
    with target.open("wb") as whole:
        whole.write(len(text).to_bytes(_HEADER_LENGTH_BYTES, "little") + text)
        for shard in shards:
            with shard.open("rb") as file:
                file.seek(_data_start(shard))
                shutil.copyfileobj(file, whole)


def _weight_map(shards: Sequence[Path], files: Sequence[str]) -> dict[str, str]:
    """Return the file of each tensor; each tensor is in exactly one."""
    if not shards:
        raise ProtocolError("export: expected one weights file of each stage, got none")
    weight_map: dict[str, str] = {}
    for shard, file in zip(shards, files, strict=True):
        for name in _tensor_names(shard):
            if name in weight_map:
                raise ProtocolError(
                    f"export: tensor '{name}' came from two stages, in '{weight_map[name]}' "
                    f"and '{file}'; expected each from one"
                )
            weight_map[name] = file
    return weight_map


def _tensor_names(shard: Path) -> list[str]:
    try:
        with safe_open(shard, framework="numpy") as tensors:
            return sorted(tensors.keys())
    except (SafetensorError, OSError) as exc:
        raise ProtocolError(f"export: '{shard.name}' is not a safetensors file: {exc}") from exc


def _data_start(shard: Path) -> int:
    """Return the offset of the tensor data: behind the header, which `safe_open` has checked."""
    with shard.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
    return _HEADER_LENGTH_BYTES + header_bytes


def _link_or_copy(source: Path, target: Path) -> None:
    source = source.resolve()
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _write_manifest(directory: Path) -> None:
    names = sorted(entry.name for entry in directory.iterdir())
    _write_json(directory / MANIFEST, {"version": 1, "files": names})


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sibling(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.swarm-ft-{role}")


def _fresh_dir(path: Path) -> Path:
    """Create an empty directory, deleting what a killed export left."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=FOLDER_MODE)
    return path


def _rename_into_place(partial: Path, out_dir: Path) -> None:
    if not out_dir.exists():
        partial.rename(out_dir)
        return
    earlier = _sibling(out_dir, "earlier")
    shutil.rmtree(earlier, ignore_errors=True)  # not every system renames a folder over another
    out_dir.rename(earlier)
    try:
        partial.rename(out_dir)
    except BaseException:
        earlier.rename(out_dir)
        raise
    shutil.rmtree(earlier)
