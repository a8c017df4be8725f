"""Files of a checkpoint in a directory or on the hub, and which of them holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from swarm_ft.errors import BadModel
from swarm_ft.stage.stored import PIECE_BYTES, StoredFile, StoredTensor

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A directory, or a hub id at one commit; fetches single files into the hub's cache.

    Attributes:
        reference: directory or hub id, as the user named it.
        revision: commit of a hub id, so that all files are of one version; None for a directory.
    """

    reference: str
    revision: str | None = None

    def refused(self, why: str) -> BadModel:
        """The error that says why this model cannot be used."""
        return BadModel(f"model '{self.reference}': {why}")

    def find(self, file_name: str) -> Path | None:
        """Path of a file, fetched first if it lies on the hub; None where there is none."""
        try:
            return self._fetch(file_name)
        except OSError:
            return None

    def require(self, file_name: str) -> Path:
        """Path of a file that has to be there.

        Raises:
            BadModel: it is not there, or cannot be fetched.
        """
        try:
            path = self._fetch(file_name)
        except OSError as exc:
            raise self.refused(f"no {file_name} ({one_line(exc)})") from exc
        if path is None:
            raise self.refused(f"no {file_name}")
        return path

    def _fetch(self, file_name: str) -> Path | None:
        from transformers.utils import cached_file  # a peer without a run needs none of it

        found: str | None = cached_file(self.reference, file_name, revision=self.revision)
        return None if found is None else Path(found)


class TensorFiles:
    """Tensors by their stored names, wherever they lie; opens only the files that a read needs."""

    def __init__(self, source: Source, file_of: Mapping[str, str]) -> None:
        self._source = source
        self._file_of = file_of

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._file_of

    def files_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names of the files that hold these tensors."""
        return tuple(dict.fromkeys(self._file_of[name] for name in names))

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], StoredTensor]]:
        """A tensor as stored, by its name, of which nothing is in memory yet.

        Raises:
            BadModel: in the call: a file is missing or unreadable.
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
                    raise self._source.refused(f"cannot read {file} ({one_line(exc)})") from exc

            yield read


def open_tensor_files(source: Source) -> TensorFiles:
    """Find a checkpoint's tensors in `model.safetensors` or by `model.safetensors.index.json`.

    Raises:
        BadModel: neither file is there, or it cannot be read.
    """
    # The single file first, as transformers does where both are there.
    single = source.find(SINGLE_FILE)
    return TensorFiles(
        source, _indexed_file_names(source) if single is None else _file_names(source, single)
    )


def _file_names(source: Source, single: Path) -> dict[str, str]:
    try:
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), SINGLE_FILE)
    except (OSError, SafetensorError) as exc:
        raise source.refused(f"cannot read {SINGLE_FILE} ({one_line(exc)})") from exc


def _indexed_file_names(source: Source) -> dict[str, str]:
    index = source.find(INDEX_FILE)
    if index is None:
        raise source.refused(
            f"expected {SINGLE_FILE} or {INDEX_FILE}, could get neither (other formats can hold "
            f"code and are not read: convert with save_pretrained)"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise source.refused(f"{INDEX_FILE} has no readable weight_map") from exc
    # An index may name files of its own directory only: it can come from a stranger's repository.
    for file in file_of.values():
        if Path(file).name != file:
            raise source.refused(f"{INDEX_FILE} names '{file}'; expected a file name")
    return file_of


def one_line(exc: Exception) -> str:
    """First line of a library's message; commands answer bad input with one line."""
    return str(exc).strip().partition("\n")[0]
