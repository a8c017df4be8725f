"""Shard of one stage: a safetensors file with its identity and a digest of its content.

Tensors keep the caller's names. Extra ones lie under `extra/`, the digests of the per-sample
buffers under `buffers/`. The file's one metadata entry names run, spec, layers and step, with a
digest of that and of all tensors. (There is only one entry because safetensors writes several in
varying order, and equal states should make equal files.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from swarm_ft.base.private_files import atomic_write
from swarm_ft.digest import DIGEST_BYTES, digest_of, file_stem
from swarm_ft.errors import BadSnapshot, Unavailable
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.snapshots.local_files import PLAIN, LocalFiles

VERSION = 1
BufferName = tuple[int, int, int]
"""Name of a buffer inside its run: boundary, end and sample."""

_METADATA = "swarm_ft"
_SIZE_BYTES = 8
"""Bytes of the length in front of a safetensors file's header."""
_EXTRA = "extra/"
_BUFFERS = "buffers/"
_BUFFER_NAMES = f"{_BUFFERS}names"
_BUFFER_DIGESTS = f"{_BUFFERS}digests"
SIDE_INFO = "bases/"
"""Prefix of the names of extra tensors with side information of codecs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardContents:
    """Content of a stage's shard.

    Attributes:
        state: Weights and moments, see `Engine.state`; contiguous tensors on the CPU.
        extras: Other state that the next steps depend on, such as residuals of error feedback.
        buffer_digests: Digest of each per-sample buffer that belongs to it, 16 bytes each.
    """

    state: Mapping[str, Tensor]
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    buffer_digests: Mapping[BufferName, bytes] = field(default_factory=dict)


def write_shard(
    folder: Path,
    name: ShardName,
    spec_digest: bytes,
    contents: ShardContents,
    files: LocalFiles = PLAIN,
) -> Path:
    """Write a shard and rename it into place; equal contents make equal files, unless sealed.

    Sealing needs the shard in memory a second time.

    Returns:
        The path, in `folder`, under a name that no other shard has.

    Raises:
        Unavailable: The disk refuses now.
    """
    tensors = _flat(contents)
    identity = _identity(name, spec_digest)
    document = {**identity, "digest": _digest(identity, tensors).hex()}
    run = f"run-{file_stem(name.run_id)}"
    path = folder / f"{run}-step-{name.step:08}-layers-{name.layers}.safetensors"
    try:
        metadata = {_METADATA: json.dumps(document)}
        if files.seals:
            files.write(path, save(tensors, metadata))
        else:
            with atomic_write(path) as partial:
                save_file(tensors, partial, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise Unavailable(f"{path} cannot be written: {error}") from error
    return path


def read_shard(
    path: Path, name: ShardName, spec_digest: bytes, files: LocalFiles = PLAIN
) -> ShardContents:
    """Return the content of a shard; do not write to the file, which may back the tensors.

    Raises:
        BadSnapshot: The file is torn, altered, or of another run, spec, stage or step. The
            caller checks what the tensors mean.
    """
    try:
        metadata, tensors = _read(path, files)
    except (OSError, SafetensorError) as error:
        raise BadSnapshot(
            f"{path}: not a whole safetensors file ({error}); take it from another peer, or an "
            f"earlier snapshot"
        ) from error
    _check_metadata(path, metadata, _identity(name, spec_digest), tensors)
    return _contents(path, tensors)


def _read(path: Path, files: LocalFiles) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    if not files.can_be_mapped(path):
        data = files.read(path)
        tensors = load(data)  # first: it checks the header
        header = data[_SIZE_BYTES : _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "little")]
        return json.loads(header).get("__metadata__", {}), tensors
    with files.open_plain(path) as plain, safe_open(plain, framework="pt") as handle:
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        return handle.metadata() or {}, tensors


def _identity(name: ShardName, spec_digest: bytes) -> dict[str, object]:
    return {
        "version": VERSION,
        "run": name.run_id,
        "spec": spec_digest.hex(),
        "layers": str(name.layers),
        "step": name.step,
    }


def _digest(identity: Mapping[str, object], tensors: Mapping[str, Tensor]) -> bytes:
    names = sorted(tensors)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_tensor_digest, names, [tensors[name] for name in names])
        return digest_of(json.dumps(identity).encode(), *digests)


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    header = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    return digest_of(header, tensor.reshape(-1).view(torch.uint8).numpy().data)


def _flat(contents: ShardContents) -> dict[str, Tensor]:
    names = sorted(contents.buffer_digests)
    digests = b"".join(contents.buffer_digests[name] for name in names)
    return {
        **contents.state,
        **{f"{_EXTRA}{name}": tensor.contiguous() for name, tensor in contents.extras.items()},
        _BUFFER_NAMES: torch.tensor(names, dtype=torch.int64).reshape(-1, 3),
        _BUFFER_DIGESTS: torch.tensor(list(digests), dtype=torch.uint8).reshape(-1, DIGEST_BYTES),
    }


def _check_metadata(
    path: Path,
    metadata: Mapping[str, str],
    expected: Mapping[str, object],
    tensors: Mapping[str, Tensor],
) -> None:
    try:
        document = json.loads(metadata[_METADATA])
        got = {key: document[key] for key in expected}
        digest = document["digest"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise BadSnapshot(f"{path}: not a shard of a snapshot") from error
    if type(got["version"]) is int and got["version"] > VERSION:
        raise BadSnapshot(
            f"{path}: expected version {VERSION}, got {got['version']}, which a later swarm-ft "
            "wrote; update this one"
        )
    for key, value in expected.items():
        if got[key] != value:
            raise BadSnapshot(
                f"{path}: expected {key} {value}, got {got[key]!r:.80}; name the snapshot of this "
                f"run and stage"
            )
    if digest != _digest(expected, tensors).hex():
        raise BadSnapshot(
            f"{path}: its tensors were altered; take it from another peer, or an earlier snapshot"
        )


def _contents(path: Path, tensors: dict[str, Tensor]) -> ShardContents:
    names, digests = tensors.pop(_BUFFER_NAMES, None), tensors.pop(_BUFFER_DIGESTS, None)
    if names is None or digests is None or not _fit(names, digests):
        raise BadSnapshot(f"{path}: expected a table of buffers, int64 [n, 3] and uint8 [n, 16]")
    keys = ((boundary, end, sample) for boundary, end, sample in names.tolist())
    return ShardContents(
        state={key: t for key, t in tensors.items() if not key.startswith(_EXTRA)},
        extras={k.removeprefix(_EXTRA): t for k, t in tensors.items() if k.startswith(_EXTRA)},
        buffer_digests=dict(zip(keys, map(bytes, digests.numpy()), strict=True)),
    )


def _fit(names: Tensor, digests: Tensor) -> bool:
    return (
        names.dtype == torch.int64
        and digests.dtype == torch.uint8
        and names.shape[1:] == (3,)
        and digests.shape == (len(names), DIGEST_BYTES)
    )
