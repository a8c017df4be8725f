"""A pre-trained checkpoint: what it is, and single blocks of it. Knows no device and no training.

A tensor's digest covers its dtype, shape and bytes as stored; a part's digest covers the config's
settings and the names and digests of its tensors, by name. Files and shards do not matter: a copy
that is cut into other shards, or saved without the base model's prefix, is the same model.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from swarm_ft.errors import BadLayers, BadModel, RunMismatch
from swarm_ft.protocol.spec.digest import digest_of
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import ModelSpec
from swarm_ft.stage.architecture import (
    EMBED_PART,
    HEAD_PART,
    HEAD_WEIGHT,
    ModelConfig,
    architecture_of,
    block_part,
    build_skeleton,
    settings_text,
)

# ---- safetensors files of one checkpoint: which file holds which tensor

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
                raise self._source.refused(f"cannot read {path.name} ({one_line(exc)})") from exc

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise self._source.refused(f"tensor {name} is not in its safetensors")
        return self._places[name]

    def _floats(self, name: str, get_tensor: Callable[[str], Tensor]) -> Tensor:
        tensor = get_tensor(self._places[name].stored_name)
        if not tensor.is_floating_point():
            raise self._source.refused(
                f"tensor {name} is {tensor.dtype}; expected floats (quantised checkpoints cannot "
                f"be trained)"
            )
        return tensor


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


CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# transformers makes up an empty tokenizer where none of these is.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
FLOAT32_BYTES = 4


class Checkpoint:
    """A checkpoint whose config and tensors' names were read, and no weights yet.

    Attributes:
        reference: directory or hub id, as the user named it.
        config: the transformers config, of a known architecture.
    """

    def __init__(
        self, source: Source, config: ModelConfig, files: TensorFiles, skeleton: nn.Module
    ) -> None:
        self.reference = source.reference
        self.config = config
        self._source = source
        self._files = files
        self._causal_class = type(skeleton).__name__
        self._architecture = architecture_of(config.model_type)
        self._shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
        self._parts: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(self._shapes):
            self._parts[self._architecture.part_of(name)].append(name)
        self._check_complete()

    def describe(self) -> ModelSpec:
        """Read every tensor once, one at a time, and digest it.

        A tied checkpoint's head digest covers the embeddings' tensor, as the head's weight.

        Raises:
            BadModel: a tensor is unreadable or of another shape than the config's.
        """
        stored = [name for name in self._shapes if name in self._files]
        digests = {name: self._digest(name, tensor) for name, tensor in self._files.read(stored)}
        tied = self._ties(digests)
        if tied:
            digests[HEAD_WEIGHT] = digests[self._architecture.embedding_weight]
        parts = {part: self._part_digest(names, digests) for part, names in self._parts.items()}
        return ModelSpec(
            reference=self.reference,
            architecture=self.config.model_type,
            num_blocks=self.config.num_hidden_layers,
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            block_bytes=self._block_bytes(),
            embed_digest=parts[EMBED_PART],
            block_digests=tuple(parts[block_part(i)] for i in range(self.config.num_hidden_layers)),
            head_digest=parts[HEAD_PART],
            tied_embeddings=tied,
        )

    def load(self, layers: LayerRange, model: ModelSpec) -> dict[str, Tensor]:
        """Float32 tensors on the CPU of these blocks alone, checked against the run's digests.

        The stage at 0 also gets the embeddings, the one at the end the final norm and its own
        copy of the head (of a tied checkpoint: of the embeddings) as `lm_head.weight`.

        Raises:
            BadLayers: layers outside the model.
            BadModel: a tensor is missing or unreadable.
            RunMismatch: the checkpoint is not the run's; names the part that differs.
        """
        self._check_layers(layers, model)
        parts = {part: self._parts[part] for part in _parts_of(layers, model)}
        stored_as = {name: self._stored(name, model) for names in parts.values() for name in names}
        digests: dict[str, bytes] = {}
        tensors: dict[str, Tensor] = {}
        for stored, tensor in self._files.read(set(stored_as.values())):
            digests[stored] = self._digest(stored, tensor)
            # A copy, so that the weights do not hang on the mapped file.
            tensors[stored] = tensor.to(torch.float32, copy=True)
        for part, names in parts.items():
            found = {name: digests[stored_as[name]] for name in names}
            self._check_part(part, self._part_digest(names, found), model)
        return self._named(stored_as, tensors)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that lies beside the weights.

        Raises:
            BadModel: there is none, or it cannot be read.
        """
        if not any(self._source.find(name) for name in TOKENIZER_FILES):
            raise self._source.refused(
                f"expected a tokenizer beside the weights ({' or '.join(TOKENIZER_FILES)}), found "
                f"none"
            )
        try:
            return AutoTokenizer.from_pretrained(
                self.reference, revision=self._source.revision or "main", trust_remote_code=False
            )
        except (OSError, ValueError, LookupError, TypeError) as exc:
            raise self._source.refused(f"its tokenizer cannot be read ({one_line(exc)})") from exc

    def save_config(self, directory: Path, tie_word_embeddings: bool) -> None:
        """Write the exported model's `config.json` (float32) and copy `generation_config.json`.

        Args:
            directory: exists.
            tie_word_embeddings: whether the exported weights lack a head of their own.
        """
        exported = copy.deepcopy(self.config)
        exported.tie_word_embeddings = tie_word_embeddings
        exported.dtype = torch.float32
        # A base model's checkpoint becomes a causal model's: the result has a head.
        exported.architectures = [self._causal_class]
        exported.save_pretrained(str(directory))
        generation = self._source.find(GENERATION_FILE)
        if generation is not None:
            shutil.copyfile(generation, directory / GENERATION_FILE)

    def _check_complete(self) -> None:
        for name in self._shapes:
            may_lack = name == HEAD_WEIGHT and self.config.tie_word_embeddings
            if name not in self._files and not may_lack:
                raise self._source.refused(
                    f"its config needs a tensor {name}, which its safetensors lack"
                )

    def _ties(self, digests: Mapping[str, bytes]) -> bool:
        # As transformers does: a head that is stored and differs is not tied, whatever the config.
        embedding = digests[self._architecture.embedding_weight]
        return self.config.tie_word_embeddings and digests.get(HEAD_WEIGHT, embedding) == embedding

    def _block_bytes(self) -> int:
        return sum(
            FLOAT32_BYTES * math.prod(self._shapes[name]) for name in self._parts[block_part(0)]
        )

    def _stored(self, name: str, model: ModelSpec) -> str:
        tied_head = name == HEAD_WEIGHT and model.tied_embeddings
        return self._architecture.embedding_weight if tied_head else name

    def _named(
        self, stored_as: Mapping[str, str], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        named = {name: tensors[stored] for name, stored in stored_as.items()}
        embedding = named.get(self._architecture.embedding_weight)
        if embedding is not None and named.get(HEAD_WEIGHT) is embedding:
            named[HEAD_WEIGHT] = embedding.clone()
        return named

    def _digest(self, name: str, tensor: Tensor) -> bytes:
        if tensor.shape != self._shapes[name]:
            raise self._source.refused(
                f"tensor {name} is {list(tensor.shape)}; its config says {list(self._shapes[name])}"
            )
        return tensor_digest(tensor)

    def _part_digest(self, names: Iterable[str], digests: Mapping[str, bytes]) -> bytes:
        pieces = (piece for name in names for piece in (name.encode(), digests[name]))
        return digest_of(settings_text(self.config).encode(), *pieces)

    def _check_layers(self, layers: LayerRange, model: ModelSpec) -> None:
        if layers.stop > model.num_blocks:
            raise BadLayers(f"layers {layers}: the model has blocks {model.layers}")
        config = self.config
        here = (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size)
        run = (model.architecture, model.num_blocks, model.hidden_size, model.vocab_size)
        if here != run:
            raise RunMismatch(
                f"model '{self.reference}': expected the run's architecture, blocks, channels and "
                f"vocabulary {run}, got {here}"
            )

    def _check_part(self, part: str, digest: bytes, model: ModelSpec) -> None:
        expected = _digest_in(model, part)
        if digest != expected:
            raise RunMismatch(
                f"model '{self.reference}': its {part} has digest {digest.hex()}, the run's "
                f"{expected.hex()}; give the very weights and config that the run began with"
            )


def open_checkpoint(reference: str) -> Checkpoint:
    """Find a checkpoint by directory or hub id and read its config and its tensors' names.

    Raises:
        BadModel: missing, without config or safetensors, incomplete, or of an unknown
            architecture.
    """
    source = _find_source(reference)
    config = _read_config(source)
    files = open_tensor_files(source, architecture_of(config.model_type).full_name)
    try:
        skeleton = build_skeleton(config)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as exc:
        raise source.refused(f"{CONFIG_FILE} describes no model ({one_line(exc)})") from exc
    return Checkpoint(source, config, files, skeleton)


def _find_source(reference: str) -> Source:
    directory, source = Path(reference), Source(reference=reference)
    if directory.is_dir():
        return source
    if directory.is_absolute() or reference.startswith(".") or directory.exists():
        raise source.refused("expected a directory or a hub id; no such directory")
    config = source.require(CONFIG_FILE)
    # In the hub's cache a file lies in the folder of its commit.
    return replace(source, revision=config.parent.name)


def _read_config(source: Source) -> ModelConfig:
    path = source.require(CONFIG_FILE)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        architecture_of(str(fields["model_type"]))
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise source.refused(f"{CONFIG_FILE} is unreadable or names no model_type") from exc
    if "quantization_config" in fields:
        raise source.refused("quantised checkpoints cannot be trained")
    try:
        config: ModelConfig = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    except (OSError, ValueError, TypeError, LookupError, StrictDataclassError) as exc:
        raise source.refused(f"{CONFIG_FILE} cannot be used ({one_line(exc)})") from exc
    return config


def _parts_of(layers: LayerRange, model: ModelSpec) -> list[str]:
    parts = [block_part(index) for index in range(layers.start, layers.stop)]
    if layers.start == 0:
        parts.insert(0, EMBED_PART)
    if layers.stop == model.num_blocks:
        parts.append(HEAD_PART)
    return parts


def _digest_in(model: ModelSpec, part: str) -> bytes:
    digests = {block_part(index): digest for index, digest in enumerate(model.block_digests)}
    digests |= {EMBED_PART: model.embed_digest, HEAD_PART: model.head_digest}
    return digests[part]
