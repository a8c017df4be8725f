"""A pre-trained checkpoint: its description, and the weights of single blocks.

A tensor's digest covers its stored dtype, shape and bytes. A part's digest covers the config's
settings, and the names and digests of the part's tensors, by transformers' names; shared tensors
belong to every block's part.

A part's digest is keyed by the run (`ModelSpec.digest_key`). The tensors' digests have no key: they
never leave a process, and a part's digest is one-way. Digests of one run therefore reveal none of
another run, and a client that describes a model for another run reads no weights again.

Files do not matter: a copy with other shards, without the base model's prefix, or with a block's
experts in one tensor, is the same model. This module uses no device and does not train.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from swarm_ft.digest import DIGEST_BYTES, digest_of
from swarm_ft.errors import BadLayers, BadModel, ModelDiffers, NonFiniteWeights
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import NO_NONCE, Dtype, ModelSpec, TaskKind, TrainOptions
from swarm_ft.protocol.spec.tasks import Task, task_of
from swarm_ft.stage.architecture import (
    EMBED_PART,
    HEAD_PART,
    SHARED_PART,
    Anatomy,
    anatomy_of,
    block_part,
    check_model_type,
    settings_text,
)
from swarm_ft.stage.conversion import TORCH_DTYPES, Recipe, recipes_for
from swarm_ft.stage.generation import end_tokens_in, save_generation_settings
from swarm_ft.stage.heads import config_for, head_of, initial_tensor
from swarm_ft.stage.names import check_model_place
from swarm_ft.stage.skeleton import ModelConfig, is_below
from swarm_ft.stage.source import (
    CONFIG_FILE,
    Source,
    TensorFiles,
    one_line,
    open_tensor_files,
)
from swarm_ft.stage.tensor_files import AnyTensor, StoredTensor, TensorDigest, fill, pieces_of
from swarm_ft.stage.tokenizer import exported_pad_token_id, prepare_for_classes, tokenizer_in
from swarm_ft.stage.unused_tensors import Unused, find_unused
from swarm_ft.stage.weight_formats import SCALES, Packing, WeightFormat, WeightFormats, own_linears

_PROBLEM_TYPES = {TaskKind.CLASSIFICATION: "single_label_classification"}
_CODE_FIELDS = frozenset({"auto_map", "custom_pipelines"})
QUANTISATION_FIELDS = ("quantization_config", "compression_config")
QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of ModelOpt, AutoGPTQ and AutoAWQ, which leave no trace in config.json."""
FLOAT32_BYTES = 4
NO_DIGEST = bytes(DIGEST_BYTES)
CONFIG_DIFFERS = "the model differs in its config"
SPREAD = 0.02
"""Standard deviation of a new head's weights, where the config has none."""
CPU = torch.device("cpu")


class Checkpoint:
    """A checkpoint whose config and tensor names were read, but no weights yet.

    Attributes:
        reference: Directory or hub id, as the user wrote it.
        config: Config of transformers, of a model that can be cut, with the task's classes.
        task: Task of the model, which determines its head.
        architecture: Names of the model's parts.
        unused: Stored tensors that the model does not use.
    """

    def __init__(
        self,
        source: Source,
        config: ModelConfig,
        files: TensorFiles,
        anatomy: Anatomy,
        train: TrainOptions,
    ) -> None:
        self.reference = source.reference
        self.config = config
        self.task = task_of(train)
        self._seed = train.seed
        self.architecture = anatomy.architecture
        self._source = source
        self._files = files
        self._skeleton = anatomy.skeleton
        self._own: dict[str, Tensor] = self._skeleton.state_dict()
        self._recipes = recipes_for(self._skeleton, files.names)
        self._parts: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(self._own):
            self._parts[self.architecture.part_of(name)].append(name)
        self._shared = self._parts.pop(SHARED_PART, [])
        for block in range(config.num_hidden_layers):
            self._parts[block_part(block)] += self._shared
        self._tensor_digests: dict[str, bytes] = {}
        self.unused = self._find_unused()
        self._check_complete()

    def describe(self, nonce: bytes | None = NO_NONCE, owner: str = "") -> ModelSpec:
        """Read every tensor once, a few at a time, and return the model with its digests.

        With tied embeddings, the digest of the head covers the embeddings' tensor under the head's
        name.

        Args:
            nonce: Nonce of the run; a client draws one for each run.
            owner: Id of the client that owns the run.

        Raises:
            BadModel: A tensor is unreadable, or has another shape than in the config.
            NonFiniteWeights: A tensor has inf or NaN; the message names the file and the tensor.
        """
        digests = self._digests()
        block_bytes, linear_bytes = self._block_bytes()
        described = ModelSpec(
            reference=self.reference,
            architecture=self.config.model_type,
            num_blocks=self.config.num_hidden_layers,
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            block_bytes=block_bytes,
            linear_bytes=linear_bytes,
            shared_bytes=self._bytes_of(self._shared),
            embed_digest=NO_DIGEST,
            block_digests=(NO_DIGEST,) * self.config.num_hidden_layers,
            head_digest=NO_DIGEST,
            tied_embeddings=self._ties(digests),
            dtype=self._dtype(),
        )
        return self.keyed(described, nonce, owner)

    def keyed(self, model: ModelSpec, nonce: bytes | None, owner: str) -> ModelSpec:
        """Return the model with the digests that this checkpoint has in another run.

        Raises:
            BadModel, NonFiniteWeights: See `describe`, which has read the weights already.
        """
        model, digests = replace(model, nonce=nonce, owner=owner), self._digests()
        parts = {
            part: self._part_digest(names, digests, model) for part, names in self._parts.items()
        }
        return replace(
            model,
            embed_digest=parts[EMBED_PART],
            block_digests=tuple(parts[block_part(i)] for i in range(self.config.num_hidden_layers)),
            head_digest=parts[HEAD_PART],
        )

    def _digests(self) -> dict[str, bytes]:
        """Return the digest of each tensor, after reading all of them once."""
        if self._tensor_digests:
            return self._tensor_digests
        there = [name for name in self._own if name in self._recipes or self._begins(name)]
        digests: dict[str, bytes] = {}
        for name, tensor in self._read(there):
            with self._reading(name):
                digest = TensorDigest(tensor).exhausted(pieces_of(tensor))
            if not digest.is_finite:
                raise NonFiniteWeights(self._describe_non_finite(name))
            digests[name] = digest.digest()
        if self._ties(digests):
            digests[self._head] = digests[self._embedding]
        self._tensor_digests = digests
        return digests

    def _dtype(self) -> Dtype:
        """Return the dtype of most weights, from the config."""
        config_dtype = getattr(self.config, "dtype", None)
        return next(
            (one for one, dtype in TORCH_DTYPES.items() if dtype == config_dtype), Dtype.FLOAT32
        )

    def load(
        self,
        layers: LayerRange,
        model: ModelSpec,
        *,
        device: torch.device = CPU,
        tie: bool = False,
        forms: WeightFormats | None = None,
    ) -> dict[str, Tensor]:
        """Load the tensors of these blocks in float32, checked against the run's digests.

        The first stage also gets the embeddings. The last one gets the final norm and its own copy
        of the head (in a tied checkpoint: of the embeddings) under the head's name. Each tensor is
        moved in pieces, so that a few MiB are used beside the result, and beside the stored parts
        of a tensor that is assembled from several (all experts of a block).

        Args:
            layers: Blocks to load.
            model: Model of the run.
            device: Device of the tensors.
            tie: With both ends of a tied checkpoint: whether both are one tensor, not two.
            forms: Forms of frozen weights; a packed one is two tensors, see `forms.SCALES`.

        Raises:
            BadLayers: The layers are outside of the model.
            BadModel: A tensor is missing or unreadable.
            ModelDiffers: The checkpoint is not the run's; the message names the part that differs.
            NonFiniteWeights: The run's own weights have inf or NaN.
        """
        if layers.stop > model.num_blocks:
            raise BadLayers(f"layers {layers}: the model has blocks {model.layers}")
        self.check_config(model)
        parts = {part: self._parts[part] for part in _parts_of(layers, model)}
        taken_as = {name: self._taken(name, model) for names in parts.values() for name in names}
        digests: dict[str, bytes] = {}
        non_finite: list[str] = []
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._read(dict.fromkeys(taken_as.values())):
            digest, own = TensorDigest(tensor), [one for one in taken_as if taken_as[one] == name]
            form = torch.float32 if forms is None else forms.at(own)
            with self._reading(name):
                placed = _placed(tensor, form, digest.passing(pieces_of(tensor)), device)
            tensors |= {f"{name}{end}": one for end, one in placed.items()}
            digests[name] = digest.digest()
            if not digest.is_finite:
                non_finite.append(name)
        for part, names in parts.items():
            found = {name: digests[taken_as[name]] for name in names}
            self._check_part(part, self._part_digest(names, found, model), model)
        # Only after the digests: a client learns no more about weights that are not the run's.
        self._check_finite(parts, taken_as, non_finite)
        scales = {name: one for name, one in tensors.items() if name.endswith(SCALES)}
        named = scales | {name: tensors[taken] for name, taken in taken_as.items()}
        if not tie and named.get(self._head) is named.get(self._embedding, ...):
            named[self._head] = named[self._head].clone()
        return named

    def blank(
        self, layers: LayerRange, model: ModelSpec, *, tie: bool, forms: WeightFormats
    ) -> dict[str, Tensor]:
        """Return tensors like those of `load` without values; nothing is read or checked."""
        names = [name for part in _parts_of(layers, model) for name in self._parts[part]]
        tensors: dict[str, Tensor] = {}
        for name in names:
            own, form = self._own[name], forms.at([name])
            if isinstance(form, Packing):
                tensors[name], tensors[f"{name}{SCALES}"] = form.empty(CPU)
            else:
                dtype = form if own.dtype.is_floating_point else own.dtype
                tensors[name] = torch.empty(own.shape, dtype=dtype)
        if tie and model.tied_embeddings and {self._head, self._embedding} <= tensors.keys():
            tensors[self._head] = tensors[self._embedding]
        return tensors

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer beside the weights; see `prepare_for_classes`.

        Raises:
            BadModel: There is none, or it cannot be read.
        """
        found = tokenizer_in(self._source)
        if self.task.labels:
            prepare_for_classes(found, self.config)
        return found

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens after which `generate` of transformers ends a text of this model."""
        return end_tokens_in(self._source, self.config)

    def save_config(
        self,
        directory: Path,
        *,
        tie_word_embeddings: bool,
        dtype: Dtype = Dtype.FLOAT32,
        end_token_ids: Iterable[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Write the exported model's `config.json` and `generation_config.json`.

        Args:
            directory: Existing directory.
            tie_word_embeddings: Whether the exported weights have no head of their own.
            dtype: Dtype of the exported weights.
            end_token_ids: Tokens that end texts in the training data, beside the model's own.
            tokenizer: Tokenizer of the result, with which a classifier pads; None: the model's own
                id.
        """
        exported = copy.deepcopy(self.config)
        exported.tie_word_embeddings = tie_word_embeddings
        exported.dtype = TORCH_DTYPES[dtype]
        if self.task.labels and tokenizer is not None:
            exported.pad_token_id = exported_pad_token_id(tokenizer, self.config)
        exported.problem_type = _PROBLEM_TYPES.get(self.task.kind)
        # These fields name code that the result does not have, since its classes are transformers'
        # own.
        for name in _CODE_FIELDS & vars(exported).keys():
            delattr(exported, name)
        # A base model's checkpoint becomes a model with the task's head.
        exported.architectures = [type(self._skeleton).__name__]
        exported.save_pretrained(str(directory))
        save_generation_settings(self._source, self.config, end_token_ids, directory)

    @property
    def skeleton(self) -> PreTrainedModel:
        """Whole model, without memory."""
        return self._skeleton

    @property
    def revision(self) -> str | None:
        """Commit of a hub id; None for a directory."""
        return self._source.revision

    @property
    def _embedding(self) -> str:
        return self.architecture.embedding_weight

    @property
    def _head(self) -> str:
        return self.architecture.head_weight

    def _begins(self, name: str) -> bool:
        """Whether a tensor belongs to a new head, which the checkpoint lacks."""
        is_of_head = head_of(self.task).is_new and is_below(name, self.architecture.new_ends)
        return is_of_head and name not in self._recipes

    @property
    def _may_tie(self) -> bool:
        return bool(getattr(self.config, "tie_word_embeddings", False))

    def _find_unused(self) -> Unused:
        """Return the stored tensors that the model does not use, sorted by kind.

        Raises:
            BadModel: One of them shows that the checkpoint is of another model.
        """
        used = {name for recipe in self._recipes.values() for name in recipe.stored}
        found = find_unused(self._skeleton, self.architecture.blocks, self._files.names, used)
        if found.refusal:
            raise self._source.error(found.refusal)
        return found

    def _check_complete(self) -> None:
        for name in self._own:
            may_lack = name == self._head and self._may_tie
            if name not in self._recipes and not may_lack and not self._begins(name):
                raise self._source.error(
                    f"its config needs a tensor {name}, which its safetensors lack"
                )

    def _ties(self, digests: Mapping[str, bytes]) -> bool:
        # As in transformers: a stored head that differs is not tied, whatever the config has.
        embedding = digests[self._embedding]
        return self._may_tie and digests.get(self._head, embedding) == embedding

    def _block_bytes(self) -> tuple[int, int]:
        """Return the float32 bytes of the largest block, and of its linear layers' weights.

        In some families a few blocks are smaller than the others.
        """
        linear = {f"{name}.weight" for name in own_linears(self._skeleton)}
        parts = (self._parts[block_part(i)] for i in range(self.config.num_hidden_layers))
        own = ([name for name in part if name not in self._shared] for part in parts)
        largest = max(own, key=self._bytes_of)
        return self._bytes_of(largest), self._bytes_of(name for name in largest if name in linear)

    def _bytes_of(self, names: Iterable[str]) -> int:
        return sum(FLOAT32_BYTES * self._own[name].numel() for name in names)

    def _taken(self, name: str, model: ModelSpec) -> str:
        tied_head = name == self._head and model.tied_embeddings
        return self._embedding if tied_head else name

    def _read(self, names: Iterable[str]) -> Iterator[tuple[str, AnyTensor]]:
        """Yield the model's tensors; each is assembled when the iteration reaches it.

        Raises:
            BadModel: A tensor or its file is unreadable, or does not fit the config.
        """
        requested = dict.fromkeys(names)
        spread = float(getattr(self.config, "initializer_range", None) or SPREAD)
        for name in filter(self._begins, requested):
            yield name, initial_tensor(name, self._own[name].shape, self._seed, spread)
        wanted = dict.fromkeys(name for name in requested if not self._begins(name))
        recipes = {id(self._recipes[name]): self._recipes[name] for name in wanted}
        with self._files.reading() as read:
            for recipe in recipes.values():
                made = self._made(recipe, {stored: read(stored) for stored in recipe.stored})
                for name in recipe.makes:
                    if name in wanted:
                        yield name, self._checked(name, made.pop(name))

    def _made(self, recipe: Recipe, stored: dict[str, StoredTensor]) -> dict[str, AnyTensor]:
        if recipe.rule is None:
            return {recipe.makes[0]: next(iter(stored.values()))}
        try:
            wholes = {name: tensor.whole() for name, tensor in stored.items()}
            return {**recipe.follow(self._skeleton, wholes)}
        except Exception as exc:
            raise self._source.error(
                f"tensor {recipe.makes[0]} cannot be assembled from "
                f"{', '.join(recipe.stored)[:200]} ({one_line(exc)})"
            ) from exc

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise self._source.error(f"cannot read tensor {name} ({one_line(exc)})") from exc

    def _checked(self, name: str, tensor: AnyTensor) -> AnyTensor:
        own = self._own[name]
        is_code = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
        if is_code or tensor.dtype.is_floating_point != own.is_floating_point():
            raise self._source.error(
                f"tensor {name} is {tensor.dtype}; expected {own.dtype} (quantised checkpoints "
                f"cannot be trained)"
            )
        if tensor.shape != own.shape:
            raise self._source.error(
                f"tensor {name} is {list(tensor.shape)}; its config says {list(own.shape)}"
            )
        return tensor

    def _part_digest(
        self, names: Iterable[str], digests: Mapping[str, bytes], model: ModelSpec
    ) -> bytes:
        pieces = (piece for name in names for piece in (name.encode(), digests[name]))
        settings = settings_text(self.config).encode()
        return digest_of(settings, *pieces, key=model.digest_key)

    def check_config(self, model: ModelSpec) -> None:
        """Compare the config with the run's model, without reading weights.

        Raises:
            ModelDiffers: The config is of another model.
        """
        check_main_settings(self.config, model, self.reference)
        shared_bytes = self._bytes_of(self._shared)
        if shared_bytes != model.shared_bytes:
            raise ModelDiffers(
                CONFIG_DIFFERS,
                private=f"model '{self.reference}': expected {model.shared_bytes} bytes that all "
                f"blocks share, got {shared_bytes}",
            )

    def _check_part(self, part: str, digest: bytes, model: ModelSpec) -> None:
        expected = _digest_in(model, part)
        if digest != expected:
            raise ModelDiffers(
                f"the model differs in its {part}; expected the weights and config with which the "
                "run began with",
                private=f"model '{self.reference}': its {part} has digest {digest.hex()}, the "
                f"run's {expected.hex()}",
            )

    def _check_finite(
        self,
        parts: Mapping[str, Iterable[str]],
        taken_as: Mapping[str, str],
        non_finite: Iterable[str],
    ) -> None:
        for name in non_finite:
            part = next(p for p, own in parts.items() if name in {taken_as[one] for one in own})
            raise NonFiniteWeights(
                f"the model's {part}: tensor {name[:200]} has values that are inf or NaN; expected "
                "finite weights",
                private=self._describe_non_finite(name),
            )

    def _describe_non_finite(self, name: str) -> str:
        files = ", ".join(self._files.files_of(self._recipes[name].stored))
        return (
            f"model '{self.reference}': tensor {name} in {files} has values that are inf or NaN "
            "in float32; expected finite weights"
        )


_AS_BY_DEFAULT = TrainOptions()


def open_checkpoint(reference: str, train: TrainOptions = _AS_BY_DEFAULT) -> Checkpoint:
    """Find a checkpoint by directory or hub id, and read its config and tensor names.

    Args:
        reference: Directory or hub id.
        train: Training options: the task, and the seed of a new head.

    Raises:
        BadModel: The checkpoint is missing, has no config or safetensors, is incomplete, or has an
            unknown architecture.
    """
    return checkpoint_at(find_source(reference), train)


def checkpoint_at(source: Source, train: TrainOptions) -> Checkpoint:
    """Open a checkpoint at a known place."""
    config = config_for(task_of(train), read_config(source, task_of(train)))
    files = open_tensor_files(source)
    return Checkpoint(source, config, files, anatomy_in(source, config, task_of(train)), train)


def check_main_settings(config: ModelConfig, model: ModelSpec, reference: str) -> None:
    """Compare a config's architecture and sizes with the run's model.

    Args:
        config: Config of the checkpoint.
        model: Model of the run.
        reference: Reference of the checkpoint, for this process's log alone.

    Raises:
        ModelDiffers: The config is of another model.
    """
    own_sizes = (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size)
    run = (model.architecture, model.num_blocks, model.hidden_size, model.vocab_size)
    if own_sizes != run:
        raise ModelDiffers(
            CONFIG_DIFFERS,
            private=f"model '{reference}': expected the run's architecture, blocks, channels and "
            f"vocabulary {run}, got {own_sizes}",
        )


def anatomy_in(source: Source, config: ModelConfig, task: Task) -> Anatomy:
    """Return the anatomy of the model that a checkpoint's config describes.

    Raises:
        BadModel: The config describes no model, or one that cannot be cut.
    """
    try:
        return anatomy_of(config, task)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as exc:
        raise source.error(f"{CONFIG_FILE} describes no model ({one_line(exc)})") from exc


def labels_of(reference: str, task: Task) -> tuple[str, ...]:
    """Return the class names of a checkpoint; empty if it has no head for the task.

    Raises:
        BadModel: The config cannot be read, or is of no model for this task.
    """
    config = read_config(find_source(reference), task)
    if head_of(task).class_names[config.model_type] not in (config.architectures or ()):
        return ()
    return tuple(config.id2label[number] for number in sorted(config.id2label))


def check_checkpoint(reference: str) -> None:
    """Check that a checkpoint can be trained for some task.

    Raises:
        BadModel: It cannot; the message has the reason for language models.
    """
    try:
        open_checkpoint(reference)
    except BadModel:
        with suppress(BadModel):
            open_checkpoint(reference, TrainOptions(task_kind=TaskKind.CLASSIFICATION))
            return
        raise


def find_source(reference: str) -> Source:
    """Find the place of a checkpoint; from the hub, this fetches the config.

    Raises:
        BadModel: There is no checkpoint.
    """
    source = Source(reference=reference)
    if check_model_place(reference):
        return source
    config = source.require(CONFIG_FILE)
    # In the hub's cache the parent folder of a file is its commit.
    return replace(source, revision=config.parent.name)


def read_config(source: Source, task: Task) -> ModelConfig:
    """Read the transformers config of a model for a task.

    Raises:
        BadModel: There is none, or it cannot be used.
    """
    path = source.require(CONFIG_FILE)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        check_model_type(str(fields["model_type"]), task)
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise source.error(f"{CONFIG_FILE} is unreadable or names no model_type") from exc
    _check_not_quantised(source, fields)
    try:
        config: ModelConfig = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    except (OSError, ValueError, TypeError, LookupError, StrictDataclassError) as exc:
        raise source.error(f"{CONFIG_FILE} cannot be used ({one_line(exc)})") from exc
    return config


def _check_not_quantised(source: Source, fields: Mapping[str, object]) -> None:
    """Refuse a checkpoint with quantised weights.

    Raises:
        BadModel: A file describes a quantisation; the message names it.
    """
    found = [
        f"{CONFIG_FILE} has {name}" for name in QUANTISATION_FIELDS if fields.get(name) is not None
    ]
    for name in QUANTISATION_FILES:
        path = source.find(name)
        if path is not None and _names_algorithm(path):
            found.append(f"it has {name}")
    if found:
        raise source.error(f"quantised checkpoints cannot be trained; {found[0]}")


def _names_algorithm(path: Path) -> bool:
    """Whether a settings file names an algorithm of quantisation; ModelOpt's may have null."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))["quantization"]
        return bool(fields["quant_algo"])
    except (OSError, ValueError, LookupError, TypeError):
        return True


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


def _placed(
    tensor: AnyTensor, form: WeightFormat, pieces: Iterator[Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Return a tensor in its form, by the suffixes of its names; integers stay as they are."""
    if isinstance(form, Packing):
        codes, scales = form.packed(pieces, device)
        return {"": codes, SCALES: scales}
    dtype = form if tensor.dtype.is_floating_point else tensor.dtype
    found = torch.empty(tensor.shape, dtype=dtype, device=device)
    fill(found, pieces)
    return {"": found}
