"""Tokens of runs: one file each, in a folder beside the journal. Blocks; belongs into threads.

A sample is a record: its row (`protocol.spec.sample_rows`), and 16 bytes of XXH3 over the run, its
RunSpec, the sample's number and the tokens. A read returns the written tokens, or an error. With a
key the tokens are sealed over the same values instead, and need no checksum.

A file grows under a temporary name and is renamed once all of it is on the disk; its run is written
to the journal after that. So a file that the journal does not know is useless, and `sweep` deletes
it. A run that is over no longer needs its tokens; the space of its file is free at once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from weakref import WeakSet

from swarm_ft.base.private_files import flush_to_disk, open_private, private_folder
from swarm_ft.base.sealing import SEAL_BYTES, Sealer
from swarm_ft.base.systems import sync_data
from swarm_ft.coordinator.journal.disk_errors import error_text
from swarm_ft.digest import digest_of, file_stem, fingerprint_of
from swarm_ft.errors import JournalError, JournalFull, NotFound
from swarm_ft.ids import RunId, SampleId
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.sample_rows import Counts, counts_of, counts_of_all, rows_in

CHECKSUM_BYTES = 16
RESERVE_BYTES = 256 << 20
"""Bytes of the disk that no job may take: commits of current runs need some."""
COUNTED_SAMPLES = 64
"""Samples that are read at a time to count them; a step may have many, of many tokens."""
SYNC_BYTES = 4 << 20
"""Bytes that are written at a time. A commit's own fsync may have to wait for unwritten data."""


class TokenFiles:
    """Token files in `folder`; with None, in a temporary folder as long as this object lives.

    Args:
        folder: Folder of the files.
        key: Key that encrypts them; None: they are plain.
        has_room: Function that returns whether the reserve for current runs is there.

    Raises:
        JournalError: The folder cannot be used.
    """

    def __init__(
        self,
        folder: Path | None,
        key: bytes | None = None,
        *,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self._form = _Form(Sealer(key, "tokens") if key is not None else None)
        self._has_room = has_room
        self._growing: WeakSet[NewTokenFile] = WeakSet()
        self.folder = folder or Path(tempfile.mkdtemp())
        self._forget: Callable[[], object] = lambda: None
        if folder is None:
            self._forget = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._numbers = count()
        try:
            private_folder(self.folder)
        except OSError as error:
            raise JournalError(f"tokens in {self.folder}: {error_text(error)}") from error

    def close(self) -> None:
        """Delete a temporary folder."""
        self._forget()

    def begin(self, run_id: RunId, spec: RunSpec) -> NewTokenFile:
        """Create a file for a run's tokens; it is invisible until it is kept.

        Raises:
            JournalFull: The disk has no room for them beside other arriving jobs.
            JournalError: The disk cannot be written.
        """
        total_bytes = spec.train.num_rows * self._form.record_bytes(spec)
        partial = self.folder / f"{file_stem(run_id)}.{next(self._numbers)}.partial"
        try:
            self._check_room(total_bytes)
            new = NewTokenFile(partial, self._path(run_id), _salt(run_id, spec), spec, self._form)
        except OSError as error:
            raise JournalError(f"tokens in {self.folder}: {error_text(error)}") from error
        self._growing.add(new)
        return new

    def free_bytes(self) -> int | None:
        """Return the free bytes of the disk; None if unknown."""
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None

    def _check_room(self, total_bytes: int) -> None:
        awaited_bytes = sum(file.awaited_bytes for file in self._growing)
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < total_bytes + awaited_bytes + RESERVE_BYTES or not self._has_room():
            awaited = f" and {_mb(awaited_bytes)} for arriving jobs" if awaited_bytes else ""
            raise JournalFull(
                f"the coordinator's disk is nearly full: the job needs {_mb(total_bytes)}, and "
                f"{_mb(free_bytes)} are free, of which {_mb(RESERVE_BYTES)} are reserved for "
                f"current runs{awaited}; ask the operator to free some space"
            )

    def read(
        self, run_id: RunId, spec: RunSpec, samples: Sequence[SampleId]
    ) -> dict[SampleId, bytes]:
        """Return rows of samples, see `spec.sample_rows`.

        Raises:
            NotFound: The run has no such sample.
            JournalError: The file is gone, cannot be read, or was altered.
        """
        path, salt, size = self._path(run_id), _salt(run_id, spec), self._form.record_bytes(spec)
        found = {}
        try:
            with path.open("rb", buffering=0) as file:
                for sample in samples:
                    row = spec.train.row_of(sample)
                    if not 0 <= row < spec.train.num_rows:
                        raise NotFound(f"{run_id} has no sample {sample}")
                    record = os.pread(file.fileno(), size, row * size)
                    tokens = self._form.tokens(salt, row, record)
                    if tokens is None:
                        raise JournalError(
                            f"{path}: sample {sample} of {run_id} is torn or altered; check the "
                            "disk, and submit the job again under another name"
                        )
                    found[sample] = tokens
        except OSError as error:
            raise JournalError(f"{path}: the tokens of {run_id}: {error_text(error)}") from error
        return found

    def count(self, run_id: RunId, spec: RunSpec, samples: Sequence[SampleId]) -> Counts:
        """Count the targets of samples, the tokens of each, and those of its documents.

        Raises:
            NotFound, JournalError: see `read`.
        """
        parts = []
        for start in range(0, len(samples), COUNTED_SAMPLES):
            some = samples[start : start + COUNTED_SAMPLES]
            found = self.read(run_id, spec, some)
            parts.append(counts_of(rows_in([found[one] for one in some], spec.train.seq_length)))
        return counts_of_all(parts)

    def delete(self, run_id: RunId) -> None:
        """Delete the tokens of a run that is over.

        This never fails: the next start sweeps what is left.
        """
        with suppress(OSError):
            self._path(run_id).unlink(missing_ok=True)

    def sweep(self, wanted: Iterable[RunId]) -> None:
        """Delete all files but those of these runs.

        Raises:
            JournalError: The folder cannot be read or written.
        """
        names = {self._path(run_id).name for run_id in wanted}
        try:
            for path in self.folder.iterdir():
                if path.name not in names:
                    path.unlink()
        except OSError as error:
            raise JournalError(f"tokens in {self.folder}: {error_text(error)}") from error

    def _path(self, run_id: RunId) -> Path:
        return self.folder / f"{file_stem(run_id)}.tokens"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


class NewTokenFile:
    """A file of tokens that one thread at a time writes; then keep or discard it.

    Attributes:
        awaited_bytes: Bytes that are not written yet; 0 once it is kept or discarded.
    """

    def __init__(self, partial: Path, path: Path, salt: bytes, spec: RunSpec, form: _Form) -> None:
        self._partial, self._path, self._salt, self._form = partial, path, salt, form
        self._sample_bytes = spec.train.sample_bytes
        self._num_samples = 0
        self._unsynced_bytes = 0
        self.awaited_bytes = spec.train.num_rows * form.record_bytes(spec)
        self._file = open_private(partial, "xb")

    def append(self, tokens: bytes) -> None:
        """Write the next samples, a whole number of them.

        Raises:
            JournalError: The disk cannot be written.
        """
        pieces: list[bytes] = []
        for start in range(0, len(tokens), self._sample_bytes):
            sample = tokens[start : start + self._sample_bytes]
            pieces.append(self._form.record(self._salt, self._num_samples, sample))
            self._num_samples += 1
        try:
            self.awaited_bytes -= self._file.write(b"".join(pieces))
            self._unsynced_bytes += len(tokens)
            if self._unsynced_bytes >= SYNC_BYTES:
                self._sync()
        except OSError as error:
            raise JournalError(f"{self._partial}: {error_text(error)}") from error

    def keep(self) -> None:
        """Rename the file to its final name, once all of it is on the disk.

        Raises:
            JournalError: The disk cannot be written.
        """
        try:
            self._sync()
            self._file.close()
            self._partial.replace(self._path)
            flush_to_disk(self._path.parent)
        except OSError as error:
            raise JournalError(f"{self._path}: {error_text(error)}") from error

    def discard(self) -> None:
        """Delete the file, unless it was kept.

        This never fails: the next start sweeps what is left.
        """
        self.awaited_bytes = 0
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)
        with suppress(OSError):
            self._file.close()

    def _sync(self) -> None:
        self._file.flush()
        sync_data(self._file.fileno())
        self._unsynced_bytes = 0


class _Form:
    """Format of a sample's record: with a checksum, or sealed."""

    def __init__(self, sealer: Sealer | None) -> None:
        self._sealer = sealer

    def record_bytes(self, spec: RunSpec) -> int:
        return spec.train.sample_bytes + (SEAL_BYTES if self._sealer else CHECKSUM_BYTES)

    def record(self, salt: bytes, sample: int, tokens: bytes) -> bytes:
        if self._sealer is not None:
            return self._sealer.seal(tokens, _place(salt, sample))
        return tokens + _checksum(salt, sample, tokens)

    def tokens(self, salt: bytes, sample: int, record: bytes) -> bytes | None:
        """Return the tokens of a record; None if it was altered."""
        if self._sealer is not None:
            try:
                return self._sealer.open(record, _place(salt, sample))
            except ValueError:
                return None
        tokens = record[:-CHECKSUM_BYTES]
        return tokens if record[-CHECKSUM_BYTES:] == _checksum(salt, sample, tokens) else None


def _salt(run_id: RunId, spec: RunSpec) -> bytes:
    """Return the salt of a run's checksums: tokens of another run or spec never match."""
    return digest_of(run_id.encode(), spec.digest())


def _place(salt: bytes, sample: int) -> bytes:
    return salt + sample.to_bytes(4, "little")


def _checksum(salt: bytes, sample: int, tokens: bytes) -> bytes:
    return fingerprint_of(_place(salt, sample) + tokens)
