"""Public models of the hub in a folder of the peer, within limits of its owner.

A job names a repository, which may or may not hold the run's model. Before weights are fetched, the
repository's size is compared with the size of the job's model. No file may become longer than the
hub announced, and the least recently used repositories are deleted for new ones. Requests do not
carry the owner's token.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.file_download import http_get

from swarm_ft.base.log import get_logger
from swarm_ft.errors import BadModel
from swarm_ft.protocol.spec.run_spec import BYTES_PER_FLOAT, ModelSpec
from swarm_ft.stage.source import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Source, one_line

logger = get_logger(__name__)

ANSWER_TIMEOUT_S = 30.0
HEADERS = {"user-agent": "swarm-ft"}
"""Headers of a request for a file; the owner's token is never added."""
MAX_SETTINGS_BYTES = 64 << 20
"""Largest config or index in bytes; the index of a model with experts has some MiB."""
TOLERANCE = 1.25
"""Largest ratio of a repository's weights to the job's model: some tensors are in no block."""
SLACK_BYTES = 64 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
NEWEST = "newest.json"
"""File in a repository's folder with the commit that was fetched last and its files' sizes."""
_USED = "used"
"""File in a repository's folder whose time is that of the last use."""


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A public repository at one commit, in use as long as this object lives.

    Attributes:
        name: Hub id.
        commit: Commit of all files.
        folder: Local folder of its files.
        sizes: Announced bytes of its files, by name.
    """

    name: str
    commit: str
    folder: Path
    sizes: Mapping[str, int] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource(Source):
    """Files of a repository, each fetched at its first use."""

    repository: Repository
    cache: HubCache

    def find(self, file_name: str) -> Path | None:
        """Return the path of a file, fetched if necessary; None if the repository lacks it."""
        return self.require(file_name) if file_name in self.repository.sizes else None

    def _fetch(self, file_name: str) -> Path | None:
        return self.cache.file(self.repository, file_name)


class HubCache:
    """The cache of repositories; see the module.

    Args:
        folder: Folder of all repositories, created with the first one.
        max_bytes: Limit of all repositories together.
        endpoint: URL of the hub; None: the one of huggingface_hub's settings.
        on_bytes: Callback before each write with its number of bytes; it may block.
        left_bytes: Returns the bytes that may still be fetched this month.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        endpoint: str | None = None,
        on_bytes: Callable[[int], object] = lambda _num_bytes: None,
        left_bytes: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        self._endpoint = endpoint
        self._on_bytes = on_bytes
        self._left_bytes = left_bytes
        self._api = HfApi(endpoint=endpoint, token=False)
        self._in_use: WeakValueDictionary[str, Repository] = WeakValueDictionary()
        self._lock = threading.RLock()

    def __call__(self, model: ModelSpec) -> HubSource:
        """Return the source of a run's model, with its config and index fetched, but no weights.

        Raises:
            BadModel: There is no such public repository, or it is larger than the job's model or
                than the owner's limits allow.
        """
        with self._lock:
            repository = self._find(model.reference)
            source = HubSource(
                reference=model.reference,
                revision=repository.commit,
                repository=repository,
                cache=self,
            )
            self._check_size(source, model)
            return source

    def file(self, repository: Repository, name: str) -> Path | None:
        """Return the path of a repository's file, fetched if necessary.

        None if there is no such file.

        Raises:
            OSError: The file cannot be fetched, has another length than announced, or does not fit.
        """
        path = repository.folder / repository.commit / name
        with self._lock:
            if name not in repository.sizes:
                return None
            if not path.is_file():
                self._fetch(repository, name, path)
            _touch(repository.folder)
        return path

    # ---- lookups

    def _find(self, name: str) -> Repository:
        folder = self._folder / name.replace("/", "--")
        try:
            found = self._query_hub(name, folder)
        except RepositoryNotFoundError as error:  # the hub reports private ones in the same way
            raise BadModel(f"model '{name}': no public repository ({one_line(error)})") from error
        except Exception as error:
            # A run continues with the local files while the hub does not answer.
            remembered = _load_cached(name, folder)
            if remembered is None:
                raise BadModel(
                    f"model '{name}': the hub did not answer ({one_line(error)})"
                ) from error
            found = remembered
        known = self._in_use.get(name)
        if known is not None and known.commit == found.commit:
            return known
        self._in_use[name] = found
        return found

    def _query_hub(self, name: str, folder: Path) -> Repository:
        info = self._api.model_info(
            name, files_metadata=True, timeout=ANSWER_TIMEOUT_S, token=False
        )
        if _COMMIT.fullmatch(info.sha or "") is None:
            raise ValueError("the hub named no commit")
        # Only plain names are accepted, since they become names of local files.
        sizes = {
            one.rfilename: int(one.size)
            for one in info.siblings or ()
            if Path(one.rfilename).name == one.rfilename and one.size is not None
        }
        return Repository(name=name, commit=str(info.sha), folder=folder, sizes=sizes)

    def _check_size(self, source: HubSource, model: ModelSpec) -> None:
        """Compare the bytes of the weights with the job's model.

        Raises:
            BadModel: There are more than the model can have.
        """
        sizes = source.repository.sizes
        for name in (CONFIG_FILE, INDEX_FILE):
            if sizes.get(name, 0) > MAX_SETTINGS_BYTES:
                raise source.error(f"{name} has {sizes[name]} bytes")
        source.require(CONFIG_FILE)
        total = sizes[SINGLE_FILE] if SINGLE_FILE in sizes else _indexed_bytes(source)
        most = most_bytes(model)
        if total > most:
            raise source.error(
                f"its weights have {total} bytes; expected {most} at most, by what the job says "
                "of its model"
            )

    # ---- fetching

    def _fetch(self, repository: Repository, name: str, path: Path) -> None:
        num_bytes = repository.sizes[name]
        if num_bytes > self._left_bytes():
            raise OSError(f"{name}: {num_bytes} bytes exceed what is left of --monthly-gb")
        self._make_room(num_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        (repository.folder / NEWEST).write_text(
            json.dumps({"commit": repository.commit, "sizes": dict(repository.sizes)}),
            encoding="utf-8",
        )
        url = hf_hub_url(repository.name, name, revision=repository.commit, endpoint=self._endpoint)
        partial = path.with_name(f"{name}.partial")
        try:
            with partial.open("wb") as file:
                http_get(
                    url,
                    _Bounded(file, num_bytes, self._on_bytes),  # type: ignore[arg-type]
                    headers=HEADERS,
                    expected_size=num_bytes,
                )
                if file.tell() != num_bytes:
                    raise OSError(f"{name}: expected {num_bytes} bytes, got {file.tell()}")
            os.replace(partial, path)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{name}: {one_line(error)}") from error
        finally:
            partial.unlink(missing_ok=True)
        logger.info("model %s: fetched %s (%d bytes)", repository.name, name, num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Delete the least recently used repositories that no run uses."""
        gc.collect()  # a released stage may hold its checkpoint in a reference cycle
        used = {one.folder for one in self._in_use.values()}
        folder_bytes = {path: bytes_in(path) for path in self._repositories()}
        for path in sorted(folder_bytes, key=_last_used_s):
            if sum(folder_bytes.values()) + num_bytes <= self.max_bytes:
                break
            if path not in used:
                shutil.rmtree(path)
                logger.info("model %s: deleted, to make room (--model-disk)", path.name)
                del folder_bytes[path]
        if sum(folder_bytes.values()) + num_bytes > self.max_bytes:
            raise OSError(
                f"{num_bytes} more bytes do not fit into --model-disk of {self.max_bytes} bytes"
            )

    def _repositories(self) -> list[Path]:
        return list(self._folder.iterdir()) if self._folder.is_dir() else []


class _Bounded:
    """A file that takes no more bytes than announced."""

    def __init__(self, file: BinaryIO, max_bytes: int, on_bytes: Callable[[int], object]) -> None:
        self._file, self._max_bytes, self._on_bytes = file, max_bytes, on_bytes

    def write(self, data: bytes) -> int:
        """Write data.

        Raises:
            OSError: The file would exceed the announced length.
        """
        if self._file.tell() + len(data) > self._max_bytes:
            raise OSError(f"the hub sends more than the {self._max_bytes} bytes that it announced")
        self._on_bytes(len(data))
        return self._file.write(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._file.tell()

    def seek(self, place: int) -> int:
        """Seek, for a server that restarts the transfer."""
        return self._file.seek(place)

    def truncate(self) -> int:
        """Truncate at the present position."""
        return self._file.truncate()


def most_bytes(model: ModelSpec) -> int:
    """Return the most bytes that the weights of a job's model may have in a repository.

    These are its blocks in float32, the embeddings, a head of the same size, and some room for
    positions and norms. Checkpoints in float64 exceed it.
    """
    ends = 2 * BYTES_PER_FLOAT * model.vocab_size * model.hidden_size
    total_bytes = model.num_blocks * model.block_bytes + model.shared_bytes + ends
    return int(TOLERANCE * total_bytes) + SLACK_BYTES


def _indexed_bytes(source: HubSource) -> int:
    """Return the bytes of all files in the index, or its `total_size` if that is larger.

    Raises:
        BadModel: There is no readable index, or it names missing files.
    """
    path, sizes = source.require(INDEX_FILE), source.repository.sizes
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        files = {str(file) for file in index["weight_map"].values()}
        total_bytes = int(index.get("metadata", {}).get("total_size", 0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise source.error(f"{INDEX_FILE} has no readable weight_map") from error
    missing = files - sizes.keys()
    if missing:
        raise source.error(f"{INDEX_FILE} names '{min(missing)[:100]}', which does not exist")
    return max(total_bytes, sum(sizes[file] for file in files))


def _load_cached(name: str, folder: Path) -> Repository | None:
    """Return the repository at the commit that was fetched last; None if there is none."""
    try:
        newest = json.loads((folder / NEWEST).read_text(encoding="utf-8"))
        return Repository(name=name, commit=newest["commit"], folder=folder, sizes=newest["sizes"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files below a folder; 0 if it does not exist."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _touch(folder: Path) -> None:
    used = folder / _USED
    used.touch()
    os.utime(used, ns=(time.time_ns(),) * 2)


def _last_used_s(folder: Path) -> float:
    used = folder / _USED
    return used.stat().st_mtime if used.exists() else 0.0
