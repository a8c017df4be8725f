"""Text files: decompressed by content, decoded as UTF-8, read line by line."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib.util
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

from swarm_ft.errors import BadDataset

HEAD_BYTES = 1 << 16
"""Bytes at the start of a file that determine how it is read."""
_CHUNK_BYTES = 1 << 16
INSTALL_CLIENT = "pip install 'swarm-ft[client]', or with pipx: pipx inject swarm-ft datasets"
"""Commands that install the extra `client`, for messages."""


def bad_dataset(path: str | Path, why: str) -> BadDataset:
    """Return the error for data that cannot be used, with the reason."""
    return BadDataset(f"dataset '{path}': {why}")


def check_library(path: str | Path, name: str, data: str) -> None:
    """Check that a library of the extra `client` is installed, without importing it.

    Args:
        path: Path or id of the data, for the message.
        name: Name of the library, such as `datasets`.
        data: Kind of data that the library reads, for the message.

    Raises:
        BadDataset: The library is missing; the message names the commands that install it.
    """
    if importlib.util.find_spec(name) is None:
        raise bad_dataset(
            path,
            f"expected the library '{name}', which reads {data}, and it is not installed; "
            f"install it with {INSTALL_CLIENT}",
        )


def reason(exc: OSError) -> str:
    """Return the system's error text without the path."""
    return exc.strerror or str(exc)


# ---- compression


class _Compression(NamedTuple):
    name: str
    magic: re.Pattern[bytes]
    decompress: Callable[[IO[bytes]], io.RawIOBase | io.BufferedIOBase]


def _decompress_zstd(file: IO[bytes]) -> io.RawIOBase:
    check_library(file.name, "pyarrow", "zstd")
    import pyarrow

    stream: io.RawIOBase = pyarrow.CompressedInputStream(file, "zstd")
    return stream


_COMPRESSIONS = {
    ".gz": _Compression("gzip", re.compile(rb"\x1f\x8b"), lambda file: gzip.GzipFile(fileobj=file)),
    ".bz2": _Compression("bzip2", re.compile(rb"BZh[1-9]1AY&SY"), bz2.BZ2File),
    ".xz": _Compression("xz", re.compile(rb"\xfd7zXZ\x00"), lzma.LZMAFile),
    ".zst": _Compression("zstd", re.compile(rb"\x28\xb5\x2f\xfd"), _decompress_zstd),
}
COMPRESSED_SUFFIXES = tuple(_COMPRESSIONS)
_MAGIC_BYTES = 16
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError)


def uncompressed_name(path: Path) -> Path:
    """Return the path without a suffix of compression: `a.jsonl` for `a.jsonl.gz`."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path


class _OpenFile(NamedTuple):
    """Content of a file, and the file as it is on disk."""

    content: IO[bytes]
    on_disk: IO[bytes]


@contextmanager
def _opened(path: Path) -> Iterator[_OpenFile]:
    """Open a file, decompressing it if its first bytes are those of a compression.

    The name does not matter: a file that was decompressed in transit often keeps its suffix.

    Raises:
        BadDataset: The compressed data is damaged or truncated.
        OSError: The file cannot be read.
    """
    with path.open("rb") as on_disk:
        magic = on_disk.read(_MAGIC_BYTES)
        on_disk.seek(0)
        found = next((one for one in _COMPRESSIONS.values() if one.magic.match(magic)), None)
        if found is None:
            yield _OpenFile(on_disk, on_disk)
            return
        try:
            stream = io.BufferedReader(cast(io.RawIOBase, found.decompress(on_disk)), _CHUNK_BYTES)
            yield _OpenFile(stream, on_disk)
        except (*_DAMAGED, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno is not None:
                raise
            raise bad_dataset(
                path,
                f"its {found.name} data cannot be decompressed ({exc}); if it is damaged or "
                "truncated, copy the file again",
            ) from exc


# ---- what is no UTF-8 text


def head_of(path: Path, num_bytes: int = HEAD_BYTES) -> bytes:
    """Return the first bytes of a file, decompressed.

    Raises:
        BadDataset: The bytes show that the file is not UTF-8 text.
        OSError: The file cannot be read.
    """
    with _opened(path) as file:
        head = file.content.read(num_bytes)
    why = _no_text(head)
    if why:
        raise bad_dataset(path, why)
    return head


_NO_TEXT = (
    (re.compile(rb"\xff\xfe|\xfe\xff"), "line 1: expected UTF-8, got UTF-16"),
    (re.compile(rb"PK\x03\x04"), "expected text, got a zip archive or a workbook; unpack it"),
    (re.compile(rb"PAR1"), "expected text, got Parquet; --data-format parquet reads it"),
    (re.compile(rb"(?s).{257}ustar"), "expected text, got a tar archive; unpack it"),
    (
        re.compile(rb"version https://git-lfs"),
        "expected data, got a Git LFS pointer; 'git lfs pull' fetches the data",
    ),
)
_CONVERT = "; convert the file: iconv -f UTF-16 -t UTF-8"


def _no_text(head: bytes) -> str:
    """Return why a file with this head is not UTF-8 text; empty if it may be."""
    why = next((why for pattern, why in _NO_TEXT if pattern.match(head)), "")
    # UTF-16 without a mark is valid UTF-8, with a NUL beside each letter of ASCII.
    if not why and 4 * head.count(0) > len(head):
        why = "line 1: expected UTF-8, got UTF-16 or binary data"
    return f"{why}{_CONVERT}" if "UTF-16" in why else why


# ---- text


def read_file(path: Path) -> str:
    """Return the text of one UTF-8 file.

    Raises:
        BadDataset: The file is missing, unreadable, damaged or not UTF-8.
    """
    try:
        head_of(path)
        with _opened(path) as file:
            return file.content.read().decode("utf-8")
    except OSError as exc:
        raise bad_dataset(path, f"cannot be read: {reason(exc)}") from exc
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        raise bad_dataset(
            path,
            f"line {line}: expected UTF-8 text, got another encoding at byte {exc.start} "
            f"({exc.reason}); convert the file to UTF-8",
        ) from exc


class Lines:
    r"""Lines of a UTF-8 file with their ends, and the progress of reading.

    A file without any `\n` in its head has lines that end in `\r`; their ends become `\n`.

    Attributes:
        number: Number of the last line read, from 1; 0 before the first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._share = 0.0
        self.number = 0

    @property
    def done(self) -> float:
        """Share of the file that was read, from 0 to 1."""
        return self._share

    @property
    def place(self) -> str:
        """Location of the last line, for errors."""
        return self.place_from(self.number)

    def place_from(self, first: int) -> str:
        """Return the location of the lines from `first` to the last one read."""
        lines = f"line {first}" if first >= self.number else f"lines {first} to {self.number}"
        return f"dataset '{self._path}', {lines}"

    def __iter__(self) -> Iterator[str]:
        head = head_of(self._path).rstrip(b"\r")
        is_cr = b"\r" in head and b"\n" not in head
        size = max(1, self._path.stat().st_size)
        with _opened(self._path) as file:
            lines = _split_at_cr(file.content) if is_cr else file.content
            num_bytes = 0
            for self.number, line in enumerate(lines, 1):
                num_bytes += len(line)
                is_plain = file.content is file.on_disk
                self._share = (num_bytes if is_plain else file.on_disk.tell()) / size
                # Windows writes a byte order mark first.
                letters = line.removeprefix(codecs.BOM_UTF8) if self.number == 1 else line
                try:
                    yield letters.decode("utf-8")
                except UnicodeDecodeError as exc:
                    raise self.error(
                        f"expected UTF-8, got another encoding ({exc.reason}); convert the file"
                    ) from exc

    def error(self, why: str, first: int | None = None) -> BadDataset:
        """Return the error of the last line, or of all lines from `first` on."""
        return BadDataset(f"{self.place_from(first or self.number)}: {why}")


def _split_at_cr(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while chunk := file.read(_CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\r")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest
