"""Tensors in safetensors files, read and written a few MiB at a time.

Files are not mapped, because mapped pages count as the process's memory beside the copy of them.
Each piece is digested and converted before the next one is read, so that a stage that loads needs
little more memory than it keeps. Files are not built in memory either: the library would hold all
tensors and all bytes at once, and the interpreter's lock meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarm_ft.digest import DIGEST_BYTES

PIECE_BYTES = 4 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNED_BYTES = 8


class StoredTensor:
    """A tensor of a file.

    Attributes:
        dtype: Stored dtype.
        shape: Shape of the tensor.
    """

    def __init__(
        self, file: BinaryIO, start: int, dtype: torch.dtype, shape: torch.Size, scratch: Tensor
    ) -> None:
        self.dtype, self.shape = dtype, shape
        self._file, self._start, self._scratch = file, start, scratch

    def pieces(self) -> Iterator[Tensor]:
        """Yield the flat values in order; each piece is overwritten by the next one of any tensor.

        Raises:
            OSError: The file is too short, or cannot be read.
        """
        left = self.shape.numel() * self.dtype.itemsize
        self._file.seek(self._start)
        while left:
            part = self._scratch[: min(left, PIECE_BYTES)]
            # numpy writes into the tensor's own memory.
            if self._file.readinto(part.numpy()) != len(part):  # type: ignore[attr-defined]
                raise OSError("the file became shorter while it was read")
            yield part.view(self.dtype)
            left -= len(part)

    def whole(self) -> Tensor:
        """Return the tensor in memory of its own.

        Raises:
            OSError: The file is too short, or cannot be read.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        fill(tensor, self.pieces())
        return tensor


class StoredFile:
    """A safetensors file, open until `close`.

    Args:
        path: Path of the file.
        scratch: Buffer for pieces, uint8 [`PIECE_BYTES`]. All files share one, because allocators
            keep freed memory in holes between the tensors that stay.

    Raises:
        OSError, SafetensorError: The file cannot be read, or has another format.
    """

    def __init__(self, path: Path, scratch: Tensor) -> None:
        with safe_open(path, framework="pt"):
            pass  # the library checks all sizes against the file
        self._file, self._scratch = path.open("rb"), scratch
        header_bytes = int.from_bytes(self._file.read(8), "little")
        self._header = json.loads(self._file.read(header_bytes))
        self._start = 8 + header_bytes

    def close(self) -> None:
        """Close the file; its tensors cannot be read afterwards."""
        self._file.close()

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor of the file, without reading its values.

        Raises:
            SafetensorError: The tensor is missing, or has a dtype that is not supported.
        """
        entry = self._header.get(name)
        dtype = None if entry is None else _DTYPES.get(entry["dtype"])
        if dtype is None:
            kind = "no tensor" if entry is None else f"an unknown type {entry['dtype']} of"
            raise SafetensorError(f"{kind} {name}")
        start = self._start + entry["data_offsets"][0]
        return StoredTensor(self._file, start, dtype, torch.Size(entry["shape"]), self._scratch)


AnyTensor = StoredTensor | Tensor
"""A tensor in a file, or one assembled from several."""


def pieces_of(tensor: AnyTensor) -> Iterator[Tensor]:
    """Yield the flat values in order, as stored; each piece is overwritten by the next one."""
    if isinstance(tensor, StoredTensor):
        yield from tensor.pieces()
    elif tensor.numel():
        yield tensor.detach().cpu().contiguous().reshape(-1)


def file_pieces(outlines: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> Iterator[bytes]:
    """Yield a safetensors file of tensors; each exists only while it is written.

    Args:
        outlines: Dtypes and shapes by name, without values.
        tensors: Tensors in that order.

    Raises:
        SafetensorError: The format lacks a dtype, or a tensor differs from its outline.
    """
    yield _header(outlines)
    for (name, outline), tensor in zip(outlines.items(), tensors, strict=True):
        if (tensor.dtype, tensor.shape) != (outline.dtype, outline.shape):
            raise SafetensorError(f"{name}: {tensor.dtype} {list(tensor.shape)} was not foretold")
        for flat in pieces_of(tensor):
            for piece in torch.split(flat.view(torch.uint8), PIECE_BYTES):
                yield piece.numpy().tobytes()


def _header(outlines: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, one in outlines.items():
        if one.dtype not in _NAMES:
            raise SafetensorError(f"{name}: safetensors files have no {one.dtype}")
        begin, end = end, end + one.nbytes
        shape = list(one.shape)
        entries[name] = {"dtype": _NAMES[one.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    return len(text).to_bytes(_ALIGNED_BYTES, "little") + text


def fill(tensor: Tensor, pieces: Iterator[Tensor]) -> None:
    """Write pieces into a contiguous tensor, converted to its dtype."""
    flat, at = tensor.view(-1), 0
    for piece in pieces:
        flat[at : at + len(piece)].copy_(piece)
        at += len(piece)


class TensorDigest:
    """Digest of a tensor's stored dtype, shape and bytes, computed while its pieces pass.

    It equals `digest_of` of a header with dtype and shape, and of the bytes.

    Attributes:
        is_finite: Whether all values so far are finite in float32.
    """

    def __init__(self, tensor: AnyTensor) -> None:
        header = f"{tensor.dtype} {list(tensor.shape)}".encode()
        num_bytes = tensor.shape.numel() * tensor.dtype.itemsize
        self.is_finite = True
        self._state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._state.update(len(header).to_bytes(8, "little") + header)
        self._state.update(num_bytes.to_bytes(8, "little"))

    def passing(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the pieces after adding them to the digest."""
        for piece in pieces:
            self._state.update(piece.view(torch.uint8).numpy().data)
            self.is_finite = self.is_finite and _all_finite(piece)
            yield piece

    def exhausted(self, pieces: Iterator[Tensor]) -> Self:
        """Add all pieces to the digest."""
        for _ in self.passing(pieces):
            pass
        return self

    def digest(self) -> bytes:
        """Return the digest of all pieces so far."""
        return self._state.digest()


def _all_finite(piece: Tensor) -> bool:
    """Whether all values [n] are finite in float32, the dtype of stages.

    Infinity and NaN survive a sum, which is cheaper than a test of each value. Finite values may
    have an infinite sum, so that the test follows in that case.
    """
    if not piece.dtype.is_floating_point:
        return True
    values = piece.float() if piece.dtype.itemsize == 1 else piece  # torch cannot sum float8
    total = float(values.sum(dtype=torch.float32))
    return math.isfinite(total) or bool(torch.isfinite(values.float()).all())
