"""Files of a checkpoint in a directory or on the hub, and the file of each tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from swarm_ft.errors import BadModel
from swarm_ft.stage.tensor_files import PIECE_BYTES, StoredFile, StoredTensor

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A directory, or a hub id at one commit, whose files are fetched into the hub's cache.

    Attributes:
        reference: Directory or hub id, as the user wrote it.
        revision: Commit of a hub id, so that all files have one version; None for a directory.
    """

    reference: str
    revision: str | None = None

    def error(self, why: str) -> BadModel:
        """Return the error for a model that cannot be used."""
        return BadModel(f"model '{self.reference}': {why}")

    def find(self, file_name: str) -> Path | None:
        """Return the path of a file, fetched from the hub if necessary; None if there is none."""
        try:
            return self._fetch(file_name)
        except OSError:
            return None

    def require(self, file_name: str) -> Path:
        """Return the path of a file that has to exist.

        Raises:
            BadModel: The file is missing, or cannot be fetched.
        """
        try:
            path = self._fetch(file_name)
        except OSError as exc:
            raise self.error(f"no {file_name} ({one_line(exc)})") from exc
        if path is None:
            raise self.error(f"no {file_name}")
        return path

    def _fetch(self, file_name: str) -> Path | None:
        from transformers.utils import cached_file  # a peer without a run needs none of it

        found: str | None = cached_file(self.reference, file_name, revision=self.revision)
        return None if found is None else Path(found)


class TensorFiles:
    """Tensors by their stored names; only files that a read needs are opened."""

    def __init__(self, source: Source, file_of: Mapping[str, str]) -> None:
        self._source = source
        self._file_of = file_of

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._file_of

    def files_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the files that hold these tensors."""
        return tuple(dict.fromkeys(self._file_of[name] for name in names))

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], StoredTensor]]:
        """Yield a function that returns a stored tensor by name, without reading its values.

        Raises:
            BadModel: A file is missing or unreadable; the function raises this.
        """
        with ExitStack() as stack:
            opened: dict[str, StoredFile] = {}
            scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)

            def read(name: str) -> StoredTensor:
                file = self._file_of[name]
                path = self._source.require(file)
                try:
                    if file not in opened:
                        opened[file] = stack.enter_context(closing(StoredFile(path, scratch)))
                    return opened[file].tensor(name)
                except (OSError, SafetensorError) as exc:
                    raise self._source.error(f"cannot read {file} ({one_line(exc)})") from exc

            yield read


def open_tensor_files(source: Source) -> TensorFiles:
    """Find a checkpoint's tensors, in `model.safetensors` or by `model.safetensors.index.json`.

    Raises:
        BadModel: Neither file exists, or it cannot be read.
    """
    # The single file comes first, as in transformers.
    single = source.find(SINGLE_FILE)
    return TensorFiles(
        source, _indexed_file_names(source) if single is None else _file_names(source, single)
    )


def _file_names(source: Source, single: Path) -> dict[str, str]:
    try:
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), SINGLE_FILE)
    except (OSError, SafetensorError) as exc:
        raise source.error(f"cannot read {SINGLE_FILE} ({one_line(exc)})") from exc


def _indexed_file_names(source: Source) -> dict[str, str]:
    index = source.find(INDEX_FILE)
    if index is None:
        raise source.error(
            f"expected {SINGLE_FILE} or {INDEX_FILE}, found neither (other formats can hold "
            f"code and are not read: convert with save_pretrained)"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise source.error(f"{INDEX_FILE} has no readable weight_map") from exc
    # An index may only name files in its own directory, since it may come from a stranger's
    # repository.
    for file in file_of.values():
        if Path(file).name != file:
            raise source.error(f"{INDEX_FILE} names '{file}'; expected a file name")
    return file_of


def one_line(exc: Exception) -> str:
    """Return the first line of a library's message, since commands report bad input in one line."""
    return str(exc).strip().partition("\n")[0]
