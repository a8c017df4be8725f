"""Tensors as they lie in safetensors files, read and written a few MiB at a time.

Nothing is mapped: what is read of a mapped file counts as the process's memory, beside the copy
that is made of it. A piece is digested and brought into its final form before the next one is
read, so a stage that loads needs little more memory than it keeps. Nor is a file made in memory:
the library would hold all its tensors and all its bytes at once, and the interpreter meanwhile.
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

from swarm_ft.protocol.spec.digest import DIGEST_BYTES

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
    """One tensor of a file.

    Attributes:
        dtype: as stored.
        shape: of the whole.
    """

    def __init__(
        self, file: BinaryIO, start: int, dtype: torch.dtype, shape: torch.Size, scratch: Tensor
    ) -> None:
        self.dtype, self.shape = dtype, shape
        self._file, self._start, self._scratch = file, start, scratch

    def pieces(self) -> Iterator[Tensor]:
        """Its values flat, in order; a piece is overwritten by the next, of whatever tensor.

        Raises:
            OSError: the file ends too early, or cannot be read.
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
        """In memory of its own.

        Raises:
            OSError: as `pieces`.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        fill(tensor, self.pieces())
        return tensor


class StoredFile:
    """A safetensors file, open until `close`.

    Args:
        path: of the file.
        scratch: uint8 [`PIECE_BYTES`], for the pieces. One for all files: allocators keep what
            they are given back, in holes between the tensors that stay.

    Raises:
        OSError, SafetensorError: it cannot be read, or is none.
    """

    def __init__(self, path: Path, scratch: Tensor) -> None:
        with safe_open(path, framework="pt"):
            pass  # the library's own checks: all sizes, and that they fit the file
        self._file, self._scratch = path.open("rb"), scratch
        header_bytes = int.from_bytes(self._file.read(8), "little")
        self._header = json.loads(self._file.read(header_bytes))
        self._start = 8 + header_bytes

    def close(self) -> None:
        """Its tensors can be read no more."""
        self._file.close()

    def tensor(self, name: str) -> StoredTensor:
        """One of its tensors, of which nothing is read yet.

        Raises:
            SafetensorError: there is none, or of a type that is not read.
        """
        entry = self._header.get(name)
        dtype = None if entry is None else _DTYPES.get(entry["dtype"])
        if dtype is None:
            kind = "no tensor" if entry is None else f"an unknown type {entry['dtype']} of"
            raise SafetensorError(f"{kind} {name}")
        start = self._start + entry["data_offsets"][0]
        return StoredTensor(self._file, start, dtype, torch.Size(entry["shape"]), self._scratch)


AnyTensor = StoredTensor | Tensor
"""In a file, or made of some that were."""


def pieces_of(tensor: AnyTensor) -> Iterator[Tensor]:
    """Its values flat, in order, as they are stored; a piece is overwritten by the next."""
    if isinstance(tensor, StoredTensor):
        yield from tensor.pieces()
    elif tensor.numel():
        yield tensor.detach().cpu().contiguous().reshape(-1)


def file_pieces(outlines: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> Iterator[bytes]:
    """A safetensors file of tensors, each of which is there while it is written.

    Args:
        outlines: their types and shapes by their names, without values.
        tensors: themselves, in that order.

    Raises:
        SafetensorError: of a type that the format lacks, or not of the type and shape foretold.
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
    """Write pieces into a contiguous tensor, which converts them to its type."""
    flat, at = tensor.view(-1), 0
    for piece in pieces:
        flat[at : at + len(piece)].copy_(piece)
        at += len(piece)


class TensorDigest:
    """Digest of a tensor's dtype, shape and bytes, as they are stored: taken while they pass by.

    It is `digest_of` of both: what names and shape are, and the bytes.

    Attributes:
        is_finite: whether all values that passed are finite in float32.
    """

    def __init__(self, tensor: AnyTensor) -> None:
        header = f"{tensor.dtype} {list(tensor.shape)}".encode()
        num_bytes = tensor.shape.numel() * tensor.dtype.itemsize
        self.is_finite = True
        self._state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._state.update(len(header).to_bytes(8, "little") + header)
        self._state.update(num_bytes.to_bytes(8, "little"))

    def passing(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        """The pieces, once they are in the digest."""
        for piece in pieces:
            self._state.update(piece.view(torch.uint8).numpy().data)
            self.is_finite = self.is_finite and _all_finite(piece)
            yield piece

    def exhausted(self, pieces: Iterator[Tensor]) -> Self:
        """Take pieces in, and do nothing else with them."""
        for _ in self.passing(pieces):
            pass
        return self

    def digest(self) -> bytes:
        """Of all that passed."""
        return self._state.digest()


def _all_finite(piece: Tensor) -> bool:
    """Whether all values [n] are finite in float32, in which stages hold them.

    Infinity and NaN pass through a sum, which costs less than a test of each value. A finite piece
    may have an infinite sum, so that test follows then.
    """
    if not piece.dtype.is_floating_point:
        return True
    values = piece.float() if piece.dtype.itemsize == 1 else piece  # torch adds up no float8
    total = float(values.sum(dtype=torch.float32))
    return math.isfinite(total) or bool(torch.isfinite(values.float()).all())
