"""Safetensors files of one checkpoint: which file holds which tensor. Knows no blocks, no run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from swarm_ft.errors import BadModel
from swarm_ft.protocol.digest import digest_of

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
            raise BadModel(f"model '{self.reference}': no {file_name} ({one_line(exc)})") from exc
        if path is None:
            raise BadModel(f"model '{self.reference}': no {file_name}")
        return path

    def _fetch(self, file_name: str) -> Path | None:
        found: str | None = cached_file(self.reference, file_name, revision=self.revision)
        return None if found is None else Path(found)


@dataclass(frozen=True, slots=True)
class _Place:
    file_name: str
    stored_name: str


class TensorFiles:
    """Tensors by full name, wherever they lie; opens only the files that a read needs."""

    def __init__(self, source: Source, places: Mapping[str, _Place]) -> None:
        self._source = source
        self._places = places

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor as stored, file after file, so that a consumer can hold one at a time.

        Raises:
            BadModel: a tensor or its file is missing, unreadable or not of floats.
        """

        def file_of(name: str) -> str:
            return self._place(name).file_name

        for file_name, group in groupby(sorted(names, key=file_of), file_of):
            path = self._source.require(file_name)
            try:
                with safe_open(path, framework="pt") as handle:
                    for name in group:
                        yield name, self._floats(name, handle.get_tensor)
            except (OSError, SafetensorError) as exc:
                raise self._unreadable(path, exc) from exc

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise BadModel(
                f"model '{self._source.reference}': tensor {name} is not in its safetensors"
            )
        return self._places[name]

    def _floats(self, name: str, get_tensor: Callable[[str], Tensor]) -> Tensor:
        tensor = get_tensor(self._places[name].stored_name)
        if not tensor.is_floating_point():
            raise BadModel(
                f"model '{self._source.reference}': tensor {name} is {tensor.dtype}; "
                f"expected floats (quantised checkpoints cannot be trained)"
            )
        return tensor

    def _unreadable(self, path: Path, exc: Exception) -> BadModel:
        return BadModel(
            f"model '{self._source.reference}': cannot read {path.name} ({one_line(exc)})"
        )


def open_tensor_files(source: Source, full_name: Callable[[str], str]) -> TensorFiles:
    """Find a checkpoint's tensors in `model.safetensors` or by `model.safetensors.index.json`.

    Args:
        source: where the files lie.
        full_name: from a stored name to the causal model's.

    Raises:
        BadModel: neither file is there, or it cannot be read.
    """
    # The single file first, as transformers does where both are there.
    single = source.find(SINGLE_FILE)
    file_of = _indexed_file_names(source) if single is None else _file_names(source, single)
    places = {full_name(stored): _Place(file, stored) for stored, file in file_of.items()}
    return TensorFiles(source, places)


def tensor_digest(tensor: Tensor) -> bytes:
    """Digest of a tensor's dtype, shape and bytes, as they are stored."""
    header = f"{tensor.dtype} {list(tensor.shape)}".encode()
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest_of(header, flat.numpy().data)


def _file_names(source: Source, single: Path) -> dict[str, str]:
    try:
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), SINGLE_FILE)
    except (OSError, SafetensorError) as exc:
        raise BadModel(
            f"model '{source.reference}': cannot read {SINGLE_FILE} ({one_line(exc)})"
        ) from exc


def _indexed_file_names(source: Source) -> dict[str, str]:
    index = source.find(INDEX_FILE)
    if index is None:
        raise BadModel(
            f"model '{source.reference}': expected {SINGLE_FILE} or {INDEX_FILE}, could get "
            f"neither (other formats can hold code and are not read: convert with save_pretrained)"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise BadModel(
            f"model '{source.reference}': {INDEX_FILE} has no readable weight_map"
        ) from exc
    # An index may name files of its own directory only: it can come from a stranger's repository.
    for file in file_of.values():
        if Path(file).name != file:
            raise BadModel(
                f"model '{source.reference}': {INDEX_FILE} names '{file}'; expected a file name"
            )
    return file_of


def one_line(exc: Exception) -> str:
    """First line of a library's message; commands answer bad input with one line."""
    return str(exc).strip().partition("\n")[0]
