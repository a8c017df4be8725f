"""Public models of the hub in a folder of the peer's own, within bounds that its owner chose.

A job names a repository, and nobody knows yet that it holds the run's model. So its size is
compared with what the job says of its model before any weights are fetched, no file may become
longer than the hub announced, and the least recently used repositories make room for new ones. No
request carries the owner's token.
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

from swarm_ft.errors import BadModel
from swarm_ft.log import get_logger
from swarm_ft.protocol.spec.run_spec import BYTES_PER_FLOAT, ModelSpec
from swarm_ft.stage.source import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Source, one_line

logger = get_logger(__name__)

ANSWER_TIMEOUT_S = 30.0
HEADERS = {"user-agent": "swarm-ft"}
"""All that a request for a file carries; nothing adds the owner's token to it."""
MAX_SETTINGS_BYTES = 64 << 20
"""Of a config or an index; an index of a model with experts has some MiB."""
TOLERANCE = 1.25
"""Of a repository's weights to those that the job says of: some tensors are in no block."""
SLACK_BYTES = 64 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
NEWEST = "newest.json"
"""A file of a repository's folder: the commit that was fetched last, and its files' sizes."""
_USED = "used"
"""A file of a repository's folder, whose time is that of its last use."""


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A public repository at one commit; it is in use as long as this object lives.

    Attributes:
        name: hub id.
        commit: that all files are of.
        folder: where its files lie here.
        sizes: of its files in bytes, as the hub announces them, by name.
    """

    name: str
    commit: str
    folder: Path
    sizes: Mapping[str, int] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource(Source):
    """Files of a repository, each fetched when it is first needed."""

    repository: Repository
    cache: HubCache

    def find(self, file_name: str) -> Path | None:
        """See `Source`; a file that the repository has and that cannot be fetched is an error."""
        return self.require(file_name) if file_name in self.repository.sizes else None

    def _fetch(self, file_name: str) -> Path | None:
        return self.cache.file(self.repository, file_name)


class HubCache:
    """See the module's docstring.

    Args:
        folder: of all repositories; made when the first one is fetched.
        max_bytes: that they may take together.
        endpoint: of the hub; None: the one of huggingface_hub's settings.
        on_bytes: called with the number of bytes that are about to be written; it may block.
        left_bytes: that may be fetched this month.
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
        """Find the repository of a run's model; its config and index are fetched, no weights.

        Raises:
            BadModel: there is no such public repository, or it is larger than the job says of its
                model, or than the owner's bounds.
        """
        with self._lock:
            repository = self._found(model.reference)
            source = HubSource(
                reference=model.reference,
                revision=repository.commit,
                repository=repository,
                cache=self,
            )
            self._check_size(source, model)
            return source

    def file(self, repository: Repository, name: str) -> Path | None:
        """A file of a repository, fetched if it is not here; None if the repository lacks it.

        Raises:
            OSError: it cannot be fetched, or is not as long as announced, or has no room.
        """
        path = repository.folder / repository.commit / name
        with self._lock:
            if name not in repository.sizes:
                return None
            if not path.is_file():
                self._fetch(repository, name, path)
            _touch(repository.folder)
        return path

    # ---- what there is

    def _found(self, name: str) -> Repository:
        folder = self._folder / name.replace("/", "--")
        try:
            found = self._announced(name, folder)
        except RepositoryNotFoundError as error:  # private ones are not found either
            raise BadModel(f"model '{name}': no public repository ({one_line(error)})") from error
        except Exception as error:
            # A run goes on with the files that are here while the hub does not answer.
            remembered = _remembered(name, folder)
            if remembered is None:
                raise BadModel(f"model '{name}': no answer ({one_line(error)})") from error
            found = remembered
        known = self._in_use.get(name)
        if known is not None and known.commit == found.commit:
            return known
        self._in_use[name] = found
        return found

    def _announced(self, name: str, folder: Path) -> Repository:
        info = self._api.model_info(
            name, files_metadata=True, timeout=ANSWER_TIMEOUT_S, token=False
        )
        if _COMMIT.fullmatch(info.sha or "") is None:
            raise ValueError("the hub named no commit")
        # Plain names only: they become names of files here.
        sizes = {
            one.rfilename: int(one.size)
            for one in info.siblings or ()
            if Path(one.rfilename).name == one.rfilename and one.size is not None
        }
        return Repository(name=name, commit=str(info.sha), folder=folder, sizes=sizes)

    def _check_size(self, source: HubSource, model: ModelSpec) -> None:
        """Compare the bytes of the weights with those that the job says of its model.

        Raises:
            BadModel: there are more.
        """
        sizes = source.repository.sizes
        for name in (CONFIG_FILE, INDEX_FILE):
            if sizes.get(name, 0) > MAX_SETTINGS_BYTES:
                raise source.refused(f"{name} has {sizes[name]} bytes")
        source.require(CONFIG_FILE)
        total = sizes[SINGLE_FILE] if SINGLE_FILE in sizes else _indexed_bytes(source)
        most = most_bytes(model)
        if total > most:
            raise source.refused(
                f"its weights have {total} bytes; expected {most} at most, by what the job says "
                "of its model"
            )

    # ---- fetching

    def _fetch(self, repository: Repository, name: str, path: Path) -> None:
        num_bytes = repository.sizes[name]
        if num_bytes > self._left_bytes():
            raise OSError(f"{name}: {num_bytes} bytes are more than are left of --monthly-gb")
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
        """Delete the repositories that were not used for longest and that no run uses."""
        gc.collect()  # a stage that was let go may hold its checkpoint in a cycle
        used = {one.folder for one in self._in_use.values()}
        there = {path: bytes_in(path) for path in self._repositories()}
        for path in sorted(there, key=_last_used_s):
            if sum(there.values()) + num_bytes <= self.max_bytes:
                break
            if path not in used:
                shutil.rmtree(path)
                logger.info("model %s: deleted, to make room (--model-disk)", path.name)
                del there[path]
        if sum(there.values()) + num_bytes > self.max_bytes:
            raise OSError(
                f"{num_bytes} bytes more have no room in --model-disk of {self.max_bytes} bytes"
            )

    def _repositories(self) -> list[Path]:
        return list(self._folder.iterdir()) if self._folder.is_dir() else []


class _Bounded:
    """A file that takes no more bytes than were announced."""

    def __init__(self, file: BinaryIO, max_bytes: int, on_bytes: Callable[[int], object]) -> None:
        self._file, self._max_bytes, self._on_bytes = file, max_bytes, on_bytes

    def write(self, data: bytes) -> int:
        """Write it.

        Raises:
            OSError: the file would become longer than it may.
        """
        if self._file.tell() + len(data) > self._max_bytes:
            raise OSError(f"the hub sends more than the {self._max_bytes} bytes that it announced")
        self._on_bytes(len(data))
        return self._file.write(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._file.tell()

    def seek(self, place: int) -> int:
        """Go back, for a server that begins again."""
        return self._file.seek(place)

    def truncate(self) -> int:
        """Forget what follows."""
        return self._file.truncate()


def most_bytes(model: ModelSpec) -> int:
    """Bytes that a repository's weights may have, by what the job says of its model.

    Its blocks in float32, the embeddings and a head of that size, and room for positions and
    norms. Checkpoints in float64 are refused by it.
    """
    ends = 2 * BYTES_PER_FLOAT * model.vocab_size * model.hidden_size
    told = model.num_blocks * model.block_bytes + model.shared_bytes + ends
    return int(TOLERANCE * told) + SLACK_BYTES


def _indexed_bytes(source: HubSource) -> int:
    """Bytes of all files that the index names, or what it says itself if that is more.

    Raises:
        BadModel: there is no index, it cannot be read, or names files that are not there.
    """
    path, sizes = source.require(INDEX_FILE), source.repository.sizes
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        files = {str(file) for file in index["weight_map"].values()}
        told = int(index.get("metadata", {}).get("total_size", 0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise source.refused(f"{INDEX_FILE} has no readable weight_map") from error
    missing = files - sizes.keys()
    if missing:
        raise source.refused(f"{INDEX_FILE} names '{min(missing)[:100]}', which is not there")
    return max(told, sum(sizes[file] for file in files))


def _remembered(name: str, folder: Path) -> Repository | None:
    """The repository at the commit that was fetched last, as far as it is here."""
    try:
        newest = json.loads((folder / NEWEST).read_text(encoding="utf-8"))
        return Repository(name=name, commit=newest["commit"], folder=folder, sizes=newest["sizes"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def bytes_in(folder: Path) -> int:
    """Bytes of all files below a folder; 0 if it is not there."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _touch(folder: Path) -> None:
    used = folder / _USED
    used.touch()
    os.utime(used, ns=(time.time_ns(),) * 2)


def _last_used_s(folder: Path) -> float:
    used = folder / _USED
    return used.stat().st_mtime if used.exists() else 0.0
