"""A model of transformers without its weights: built, filled with what no file has, cut."""

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
    """What this package reads of a transformers config; the families' aliases answer to these."""

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
        """All fields that are not their family's defaults."""


RECORDED = "router_logits"
"""Of a base's outputs, what transformers calls those of routers."""


def reports_router(config: ModelConfig) -> bool:
    """Whether the config asks for a router's auxiliary loss."""
    return bool(getattr(config, "output_router_logits", False))


def refused(config: ModelConfig, why: str) -> BadModel:
    """The error that says why a model cannot be trained by stages."""
    return BadModel(f"architecture '{config.model_type}' cannot be cut into stages: {why}")


def base_of(skeleton: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """Name and module of the model without its head.

    Raises:
        BadModel: there are several such, or none.
    """
    children = dict(skeleton.named_children())
    found = [name for name, child in children.items() if isinstance(child, PreTrainedModel)]
    if len(found) != 1:
        told = ", ".join(found) or "none"
        raise refused(skeleton.config, f"expected one model beside its head, found {told}")
    return found[0], children[found[0]]


def embedded_size(model: PreTrainedModel, layers: LayerRange) -> int:
    """Channels of what a model takes in the place of tokens, whole or cut to these blocks.

    Some make more of them in front of the first block than their tokens' table has.
    """
    if layers.start > 0:
        return int(model.config.hidden_size)
    return int(model.get_input_embeddings().weight.shape[1])


def sees_all(config: ModelConfig) -> bool:
    """Whether tokens see those behind them, and so what pads a sample has to be masked."""
    # Families of encoders that have cross attention become decoders by `is_decoder`.
    may_decode = hasattr(config, "add_cross_attention")
    is_encoder = not getattr(config, "is_decoder", True)
    return is_encoder if may_decode else config.model_type in ENCODERS


def tells_texts(config: ModelConfig) -> bool:
    """Whether tokens of a second text are told from those of a first."""
    return getattr(config, "type_vocab_size", 0) > 1


def build_skeleton(config: ModelConfig, task: Task) -> PreTrainedModel:
    """The whole model on the meta device, with a task's head: every name and shape, no memory.

    Head and embeddings are two tensors in it, tied or not: they may live on two machines.

    Raises:
        BadModel: it is no decoder, and no encoder whose head is known.
        ValueError: transformers cannot build it from these numbers.
    """
    is_wanted = not sees_all(config) or (head_of(task).is_new and config.model_type in ENCODERS)
    if not is_wanted or getattr(config, "is_encoder_decoder", False):
        raise refused(config, "expected a decoder, whose tokens see none behind them")
    untied = copy.deepcopy(config_for(task, config))
    untied.tie_word_embeddings = False
    if reports_router(config):
        # Its loss is of all blocks and a whole batch, which no stage has.
        untied.output_router_logits = False
    build = partial(head_of(task).auto.from_config, untied, dtype=torch.float32)
    with torch.device("meta"):
        try:
            skeleton: PreTrainedModel = build(attn_implementation="sdpa")
        except ValueError:  # of a family without it; if it is the numbers, this says so again
            skeleton = build(attn_implementation="eager")
    if head_of(task).is_new and skeleton.config.pad_token_id is None:
        # Classifiers ask for one, by which they find where samples end; here lengths say it.
        skeleton.config.pad_token_id = 0
    return skeleton


# ---- buffers that are computed, not trained, and in no checkpoint


def fill_buffers(skeleton: PreTrainedModel, but: Iterable[str] = ()) -> None:
    """Compute buffers such as rotary frequencies, on the CPU, as transformers does.

    Args:
        skeleton: whose buffers without memory are filled; a module's weights stay as they are.
        but: modules to pass over, with all below them.

    Raises:
        BadModel: transformers does not say what one of them holds.
    """
    passed, model = tuple(but), skeleton
    for name, owner in skeleton.named_modules():
        if isinstance(owner, PreTrainedModel):
            model = owner  # the innermost one knows its own buffers
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
        # transformers' own sign for: it has its values, leave it alone.
        vars(weight)["_is_hf_initialized"] = True
    with torch.no_grad():
        model._init_weights(owner)  # noqa: SLF001 - how transformers fills them, too
    for key in lacking:
        if _is_unset(owner.get_buffer(key)):
            raise refused(model.config, f"nothing says what its buffer {name}.{key} holds")


def _meta_buffers(owner: nn.Module) -> dict[str, Tensor]:
    return {key: one for key, one in owner.named_buffers(recurse=False) if one.is_meta}


def _unset(buffer: Tensor) -> Tensor:
    return torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device="cpu")


def _is_unset(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and not bool(buffer.isnan().logical_not().all())


# ---- a stage's part of it


class Blocks(nn.ModuleList):
    """Some of a model's blocks, which keep the names that they have in the whole.

    Attributes:
        called_by: what the base calls in a block's place, given its index and the block; None for
            the block itself.
    """

    def __init__(self, blocks: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.called_by: Callable[[int, nn.Module], object] | None = None
        for index, block in blocks.items():
            self.add_module(str(index), block)

    def __iter__(self) -> Iterator[Any]:
        """In their order, as the base goes through them."""
        for name, block in self.named_children():
            yield block if self.called_by is None else self.called_by(int(name), block)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - torch's own signature
        """By place, not by name; a slice is a list."""
        return list(self)[index]


class Absent(nn.Module):
    """In the place of a module that another stage has; what it gives reaches nobody."""

    weight = torch.zeros(0)  # some bases ask for its type

    def forward(self, *inputs: object, **named: object) -> Tensor:
        """Its input, if that is hidden states; else a zero, which can be added to any."""
        given = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        hidden = [value for value in given if value.is_floating_point() and value.ndim > 2]
        return hidden[0] if hidden else torch.zeros((), device=given[0].device if given else None)


def keep(skeleton: nn.Module, blocks: str, layers: LayerRange, absent: Iterable[str]) -> None:
    """Leave these of a model's blocks, and nothing of the modules that are to be absent."""
    for name in absent:
        parent, _, attribute = name.rpartition(".")
        setattr(skeleton.get_submodule(parent), attribute, Absent())
    parent, _, attribute = blocks.rpartition(".")
    base, whole = skeleton.get_submodule(parent), list(skeleton.get_submodule(blocks).children())
    own = {index: whole[index] for index in range(layers.start, layers.stop)}
    setattr(base, attribute, Blocks(own))
    # Blocks read the config that they were built with; their base counts its own by this one.
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
