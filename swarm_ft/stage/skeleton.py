"""A model of transformers without its weights: built, filled with computed buffers, cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_ft.errors import BadModel
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.tasks import Task
from swarm_ft.stage.heads import ENCODERS, config_for, head_of


class ModelConfig(Protocol):
    """The fields of a transformers config that this package reads; aliases of families work too."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    tie_word_embeddings: bool
    pad_token_id: int | None
    dtype: torch.dtype
    architectures: list[str] | None
    id2label: dict[int, str]
    problem_type: str | None

    def save_pretrained(self, save_directory: str) -> None:
        """Write `config.json` into the directory."""

    def to_diff_dict(self) -> dict[str, Any]:
        """Return all fields that differ from their family's defaults."""


ROUTER_LOGITS = "router_logits"
"""Name of router outputs among a base's outputs in transformers."""


def reports_router(config: ModelConfig) -> bool:
    """Whether the config requests a router's auxiliary loss."""
    return bool(getattr(config, "output_router_logits", False))


def uncuttable_error(config: ModelConfig, why: str) -> BadModel:
    """Return the error for a model that cannot be trained in stages."""
    return BadModel(f"architecture '{config.model_type}' cannot be cut into stages: {why}")


def base_of(skeleton: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """Return name and module of the model without its head.

    Raises:
        BadModel: There is none, or there are several.
    """
    children = dict(skeleton.named_children())
    found = [name for name, child in children.items() if isinstance(child, PreTrainedModel)]
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise uncuttable_error(
            skeleton.config, f"expected one model beside its head, found {names}"
        )
    return found[0], children[found[0]]


def embedded_size(model: PreTrainedModel, layers: LayerRange) -> int:
    """Return the channels of a model's `inputs_embeds`, for the whole model or a stage.

    Some models have more channels before the first block than their table of tokens.
    """
    if layers.start > 0:
        return int(model.config.hidden_size)
    return int(model.get_input_embeddings().weight.shape[1])


def is_bidirectional(config: ModelConfig) -> bool:
    """Whether tokens see later tokens, so that padding has to be masked."""
    # Encoder families with cross attention become decoders by `is_decoder`.
    may_decode = hasattr(config, "add_cross_attention")
    is_encoder = not getattr(config, "is_decoder", True)
    return is_encoder if may_decode else config.model_type in ENCODERS


def has_token_types(config: ModelConfig) -> bool:
    """Whether the model distinguishes tokens of a second text from those of a first."""
    return getattr(config, "type_vocab_size", 0) > 1


def build_skeleton(config: ModelConfig, task: Task) -> PreTrainedModel:
    """Return the whole model on the meta device, with a task's head: names and shapes only.

    Head and embeddings are always two tensors in it, since they may live on two machines.

    Raises:
        BadModel: The model is no decoder, and no encoder with a known head.
        ValueError: transformers cannot build a model of this config.
    """
    is_supported = not is_bidirectional(config) or (
        head_of(task).is_new and config.model_type in ENCODERS
    )
    if not is_supported or getattr(config, "is_encoder_decoder", False):
        raise uncuttable_error(config, "expected a decoder, whose tokens do not see later tokens")
    untied = copy.deepcopy(config_for(task, config))
    untied.tie_word_embeddings = False
    if reports_router(config):
        # The auxiliary loss is over all blocks and a whole batch, which no stage has.
        untied.output_router_logits = False
    build = partial(head_of(task).auto.from_config, untied, dtype=torch.float32)
    with torch.device("meta"):
        try:
            skeleton: PreTrainedModel = build(attn_implementation="sdpa")
        except ValueError:  # the family lacks it, or the config is bad and raises again here
            skeleton = build(attn_implementation="eager")
    if head_of(task).is_new and skeleton.config.pad_token_id is None:
        # Classifiers need this id to find the ends of samples; here lengths give the ends.
        skeleton.config.pad_token_id = 0
    return skeleton


# ---- computed buffers, which no checkpoint has


def fill_buffers(skeleton: PreTrainedModel, but: Iterable[str] = ()) -> None:
    """Compute buffers such as rotary frequencies, on the CPU, as transformers does.

    Args:
        skeleton: Model whose buffers without memory are filled; weights do not change.
        but: Modules to leave out, with everything below them.

    Raises:
        BadModel: transformers cannot compute one of them.
    """
    passed, model = tuple(but), skeleton
    for name, owner in skeleton.named_modules():
        if isinstance(owner, PreTrainedModel):
            model = owner  # the innermost model initialises its own buffers
        if not is_below(name, passed):
            _fill(model, name, owner)


def is_below(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or tensor is one of these modules, or lies in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _fill(model: PreTrainedModel, name: str, owner: nn.Module) -> None:
    computed = owner._non_persistent_buffers_set  # noqa: SLF001 - torch tells it nobody else
    lacking = [key for key in sorted(computed) if key in _meta_buffers(owner)]
    if not lacking:
        return
    for key in lacking:
        setattr(owner, key, _unset(owner.get_buffer(key)))
    for weight in owner.parameters(recurse=False):
        # transformers leaves weights with this mark unchanged.
        vars(weight)["_is_hf_initialized"] = True
    with torch.no_grad():
        model._init_weights(owner)  # noqa: SLF001 - transformers fills them in this way too
    for key in lacking:
        if _is_unset(owner.get_buffer(key)):
            raise uncuttable_error(model.config, f"nothing says what its buffer {name}.{key} holds")


def _meta_buffers(owner: nn.Module) -> dict[str, Tensor]:
    return {key: one for key, one in owner.named_buffers(recurse=False) if one.is_meta}


def _unset(buffer: Tensor) -> Tensor:
    return torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device="cpu")


def _is_unset(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and not bool(buffer.isnan().logical_not().all())


# ---- a stage's part of a model


class Blocks(nn.ModuleList):
    """Some of a model's blocks, with their names in the whole model.

    Attributes:
        called_by: Returns the object that the base calls in a block's place, by index and block;
            None: the block itself.
    """

    def __init__(self, blocks: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.called_by: Callable[[int, nn.Module], object] | None = None
        for index, block in blocks.items():
            self.add_module(str(index), block)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the blocks in their order."""
        for name, block in self.named_children():
            yield block if self.called_by is None else self.called_by(int(name), block)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - torch's own signature
        """Return a block by its place, not by name; a slice is a list."""
        return list(self)[index]


class Placeholder(nn.Module):
    """The placeholder of a module of another stage; its output is not used."""

    weight = torch.zeros(0)  # some bases read its dtype

    def forward(self, *inputs: object, **named: object) -> Tensor:
        """Return the input if it is hidden states.

        Else a zero, which can be added to any tensor.
        """
        given = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        hidden = [value for value in given if value.is_floating_point() and value.ndim > 2]
        return hidden[0] if hidden else torch.zeros((), device=given[0].device if given else None)


def cut_blocks(skeleton: nn.Module, blocks: str, layers: LayerRange, absent: Iterable[str]) -> None:
    """Remove all other blocks, and replace the modules in `absent` by placeholders."""
    for name in absent:
        parent, _, attribute = name.rpartition(".")
        setattr(skeleton.get_submodule(parent), attribute, Placeholder())
    parent, _, attribute = blocks.rpartition(".")
    base, whole = skeleton.get_submodule(parent), list(skeleton.get_submodule(blocks).children())
    own = {index: whole[index] for index in range(layers.start, layers.stop)}
    setattr(base, attribute, Blocks(own))
    # Blocks read the config of their construction; the base counts its blocks by this config.
    if hasattr(base, "config"):
        vars(base)["config"] = _config_of(base.config, len(whole), layers)


def _config_of(config: Any, num_blocks: int, layers: LayerRange) -> Any:  # noqa: ANN401
    own = copy.copy(config)
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == num_blocks:
            vars(own)[name] = value[layers.start : layers.stop]
    count = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if count in vars(own):
        vars(own)[count] = layers.stop - layers.start
    return own
