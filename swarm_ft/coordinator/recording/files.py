"""A recording on disk: append-only files in a directory beside the journal.

Each file begins with a `Base`, so that the oldest may be deleted when there is no room: the rest
can still be replayed. A file has a first line that identifies it, then frames: length of the
payload (uint32), its checksum (XXH3, uint64), the payload. Payloads are pieces of one zlib stream,
each flushed; beside an encrypted journal each is sealed for its position. A frame that a kill cuts
off does not count. The recording of a running coordinator may be read.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, get_args

import xxhash

from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import open_private, private_folder
from swarm_ft.base.sealing import Sealer
from swarm_ft.build import described_version
from swarm_ft.coordinator.facts.events import Event
from swarm_ft.coordinator.recording.entries import Base, Batch, Decided, Entry
from swarm_ft.coordinator.recording.values import RECORDED
from swarm_ft.errors import BadInput, JournalError, SwarmError

logger = get_logger(__name__)

RECORDING_BYTES = 256 << 20
"""Bytes of all files together, by default."""
NUM_FILES = 8
"""Number of files that share the bytes; the oldest file is deleted at a time."""
MAX_WAITING = 120
"""Batches that wait for a slow disk; then one is left out, and a new file begins."""
SUFFIX = ".recording"
VERSION = 4
"""Version of the values in the files."""
OLDEST = 1
"""Oldest version that can be read; `recording.earlier` has the differences."""
_FIRST_LINE = re.compile(rb"swarm-ft recording (\d{1,9})(, sealed)?(?:; written by (.{1,100}))?\n")
MAX_FIRST_LINE_BYTES = 200
_HEAD = struct.Struct("<IQ")
MAX_BATCH_BYTES = 64 << 20
"""Bytes of a batch as text. Recordings may come from anybody, so their unpacked size is limited."""
_ENTRIES: dict[str, Any] = {kind.__name__: kind for kind in get_args(Entry)}
_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


def folder_of(journal: str | Path) -> Path:
    """Return the directory of a journal's recording."""
    return Path(f"{journal}{SUFFIX}")


# ---- writing


class RecordingFiles:
    """A `Sink` whose own thread encodes and writes.

    If the disk fails only the recording is lost: it logs a warning and tries again with a new file.

    Args:
        folder: Directory, created if it does not exist.
        key: Key of an encrypted journal.
        max_bytes: Bytes of all files.
    """

    def __init__(
        self, folder: Path, key: bytes | None = None, max_bytes: int = RECORDING_BYTES
    ) -> None:
        self._folder = folder
        self._sealer = _sealer(key)
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recording")
        self._num_waiting = 0
        self._wants_base = True
        self._file: _Writing | None = None

    @property
    def wants_base(self) -> bool:
        """Whether the next batch must begin with a `Base`."""
        return self._wants_base

    def put(self, batch: Batch) -> None:
        """Queue a batch for the writing thread."""
        begins = isinstance(batch.entries[0], Base)
        if self._num_waiting >= MAX_WAITING:
            self._wants_base = True
            return
        if begins:
            self._wants_base = False
        elif self._wants_base:
            return  # batches after a gap cannot be replayed
        self._num_waiting += 1
        self._thread.submit(self._write, batch, begins=begins)

    def close(self) -> None:
        """Write all waiting batches."""
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()

    def _write(self, batch: Batch, *, begins: bool) -> None:
        self._num_waiting -= 1
        try:
            if begins:
                self._begin_file()
            if self._file is not None:
                self._file.append(_text_to_write(batch))
                self._wants_base |= self._file.num_bytes >= self._max_bytes // NUM_FILES
        except OSError as error:
            logger.warning("recording %s: %s; a part of it is lost", self._folder, error)
            self._give_up()
        except Exception:  # a bug here must cost the recording alone
            logger.exception("recording %s: a part of it is lost", self._folder)
            self._give_up()

    def _give_up(self) -> None:
        file, self._file, self._wants_base = self._file, None, True
        if file is not None:
            with suppress(OSError):
                file.close()

    def _begin_file(self) -> None:
        if self._file is not None:
            self._file.close()
        private_folder(self._folder)
        known = _paths(self._folder)
        self._make_room(known)
        number = int(known[-1].stem) + 1 if known else 1
        self._file = _Writing(self._folder / f"{number:08d}", self._sealer)

    def _make_room(self, known: Sequence[Path]) -> None:
        left = self._max_bytes - self._max_bytes // NUM_FILES
        for path in reversed(known):
            left -= path.stat().st_size
            if left < 0:
                path.unlink()


class _Writing:
    """A file that grows."""

    def __init__(self, path: Path, sealer: Sealer | None) -> None:
        self._file: IO[bytes] = open_private(path, "xb")
        self._name = path.name
        self._sealer = sealer
        self._zip = zlib.compressobj()
        self._num_frames = 0
        self.num_bytes = self._file.write(_first_line(is_sealed=sealer is not None))

    def append(self, text: bytes) -> None:
        payload = self._zip.compress(text) + self._zip.flush(zlib.Z_SYNC_FLUSH)
        if self._sealer is not None:
            payload = self._sealer.seal(payload, _place(self._name, self._num_frames))
        self._num_frames += 1
        head = _HEAD.pack(len(payload), xxhash.xxh3_64_intdigest(payload))
        self.num_bytes += self._file.write(head + payload)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _first_line(*, is_sealed: bool) -> bytes:
    sealed = ", sealed" if is_sealed else ""
    return f"swarm-ft recording {VERSION}{sealed}; written by {described_version()}\n".encode()


# ---- reading


class RecordingFile:
    """A file of a recording.

    Args:
        path: Path of the file.
        key: Key of an encrypted journal.
    """

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        self._path = path
        self._sealer = _sealer(key)

    def batches(self) -> Iterator[Batch]:
        """Yield the complete batches, in order; none if the file is gone.

        The first one begins with a `Base`.

        Raises:
            BadInput: The file is no recording, or encrypted with another key.
            JournalError: The file cannot be read.
        """
        unzip = zlib.decompressobj()
        writer = "?"
        try:
            with self._path.open("rb") as file:
                writer = self._checked_writer(file)
                for number, payload in enumerate(_frames(file)):
                    text = unzip.decompress(self._opened(payload, number), MAX_BATCH_BYTES)
                    if unzip.unconsumed_tail:
                        raise ValueError(f"a batch has more than {MAX_BATCH_BYTES} bytes")
                    yield batch_from(text)
        except FileNotFoundError:
            return  # it was deleted to make room
        except (OSError, zlib.error, ValueError, TypeError, KeyError, SwarmError) as error:
            if isinstance(error, BadInput):
                raise
            raise JournalError(
                f"recording {self._path}: it cannot be read: {error}; swarm-ft {writer} wrote it"
            ) from error
        except RecursionError:
            raise JournalError(
                f"recording {self._path}: it cannot be read: it is nested too deeply"
            ) from None

    def begins(self) -> Batch | None:
        """Return the first batch, if there is one."""
        return next(self.batches(), None)

    def _checked_writer(self, file: IO[bytes]) -> str:
        """Read the first line, and return the version of swarm-ft that wrote the file."""
        found = _FIRST_LINE.fullmatch(file.readline(MAX_FIRST_LINE_BYTES))
        if found is None:
            raise BadInput(
                f"recording {self._path}: expected a coordinator's recording, got another kind of "
                "file; move it to another directory"
            )
        version, is_sealed = int(found[1]), found[2] is not None
        if is_sealed != (self._sealer is not None):
            how = "not encrypted; leave the key out"
            how = "encrypted; name the key file that the coordinator has" if is_sealed else how
            raise BadInput(f"recording {self._path}: it is {how} (--encrypt-at-rest)")
        writer = (found[3] or b"").decode(errors="replace") or self._writer_in_base(file)
        if not OLDEST <= version <= VERSION:
            raise BadInput(
                f"recording {self._path}: expected version {OLDEST} to {VERSION}, got {version}, "
                f"which swarm-ft {writer} wrote; replay it with that one"
            )
        return writer

    def _writer_in_base(self, file: IO[bytes]) -> str:
        """Return the version of swarm-ft in the first entry, if that can be read."""
        start = file.tell()
        try:
            payload = self._opened(next(_frames(file)), 0)
            text = zlib.decompressobj().decompress(payload, MAX_BATCH_BYTES)
            (_, base), *_ = json.loads(text)[2]
            return "".join(filter(str.isprintable, str(base["version"])))[:MAX_FIRST_LINE_BYTES]
        except (StopIteration, ValueError, LookupError, TypeError, RecursionError, zlib.error):
            return "of an unknown version"
        finally:
            file.seek(start)

    def _opened(self, payload: bytes, number: int) -> bytes:
        if self._sealer is None:
            return payload
        try:
            return self._sealer.open(payload, _place(self._path.name, number))
        except ValueError as error:
            raise BadInput(f"recording {self._path}: {error}; name the journal's own") from None


def files_of(journal: Path, key: bytes | None = None) -> list[RecordingFile]:
    """Return the files of a journal's recording, oldest first.

    Raises:
        BadInput: There is no such journal, or it has no recording.
    """
    try:
        with journal.open("rb") as file:
            is_journal = file.read(16) == b"SQLite format 3\0"
    except OSError as error:
        raise BadInput(f"journal {journal}: {error.strerror or error}") from None
    if not is_journal:
        raise BadInput(f"journal {journal}: this is no coordinator's journal; name another file")
    folder = folder_of(journal)
    paths = _paths(folder)
    if not paths:
        raise BadInput(
            f"journal {journal}: expected its recording in {folder}, got nothing; a coordinator "
            "with --recording-size 0, or one of an older swarm-ft, writes none"
        )
    return [RecordingFile(path, key) for path in paths]


def _paths(folder: Path) -> list[Path]:
    """Return the files of a recording, oldest first."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.isdigit())
    except OSError:
        return []


def _frames(file: IO[bytes]) -> Iterator[bytes]:
    """Yield complete payloads, until one is cut off."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        size, checksum = _HEAD.unpack(head)
        payload = file.read(size) if size <= MAX_BATCH_BYTES else b""
        if len(payload) < size or xxhash.xxh3_64_intdigest(payload) != checksum:
            return
        yield payload


def _sealer(key: bytes | None) -> Sealer | None:
    return None if key is None else Sealer(key, "recording")


def _place(name: str, number: int) -> bytes:
    return f"{name} {number}".encode()


# ---- batches as text


def text_of(batch: Batch) -> str:
    """Return a batch as text."""
    entries = [_entry_text(entry) for entry in batch.entries]
    return json.dumps([batch.unix_s, batch.now_s, entries], separators=(",", ":"))


def _text_to_write(batch: Batch) -> bytes:
    """Return a batch as the bytes to write.

    Raises:
        OSError: The batch is too long to be read again.
    """
    data = text_of(batch).encode()
    if len(data) > MAX_BATCH_BYTES:
        raise OSError(f"a batch has {len(data)} bytes, expected {MAX_BATCH_BYTES} at most")
    return data


def _entry_text(entry: Entry) -> list[Any]:
    if isinstance(entry, Decided):
        event = entry.event
        return [type(event).__name__, entry.now_s, RECORDED.encode(event)]
    return [type(entry).__name__, RECORDED.encode(entry)]


def batch_from(text: bytes) -> Batch:
    """Return the batch of a text that `text_of` made.

    Raises:
        ValueError, TypeError, KeyError, SwarmError: The text is no batch.
    """
    unix_s, now_s, entries = json.loads(text)
    return Batch(unix_s, now_s, tuple(_entry_from(*entry) for entry in entries))


def _entry_from(name: str, *parts: Any) -> Entry:  # noqa: ANN401
    if name in _EVENTS:
        now_s, found = parts
        return Decided(now_s, RECORDED.decode(_EVENTS[name], found))
    (found,) = parts
    entry: Entry = RECORDED.decode(_ENTRIES[name], found)
    return entry
