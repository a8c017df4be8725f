"""The parts of a model and their names, found by running the modules around its blocks.

Any causal model of transformers is supported that is one stack of blocks, where each block gets one
hidden tensor and nothing else that depends on the text. Values that all blocks get and that depend
on weights alone, such as a table of relative positions, are computed by every stage. The parts are
not listed in a table: the model runs without memory, and probes in the place of its blocks record
their inputs. This module reads no weights.

Shapes: B samples, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
from transformers import PreTrainedModel

from swarm_ft.errors import BadModel, BadOption
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.tasks import Task
from swarm_ft.stage.heads import head_of
from swarm_ft.stage.skeleton import (
    ModelConfig,
    base_of,
    build_skeleton,
    cut_blocks,
    embedded_size,
    fill_buffers,
    is_below,
    uncuttable_error,
)

EMBED_PART = "embeddings"
SHARED_PART = "shared by all blocks"
HEAD_PART = "head"
_POOLER = "pooler"
"""Ending of the name of a pooler, which makes one vector of a text, in front of the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Full names of a causal model's parts.

    Attributes:
        num_blocks: Number of blocks of the whole model.
        blocks: Name of the list of transformer blocks.
        embeddings: Modules that only the first stage needs.
        ends: Modules that only the last stage needs, usually the final norm and the head.
        shared: Modules that every stage needs, because all blocks get their output.
        token_embeddings: Table of token embeddings, one of `embeddings`.
        head: Module that computes logits of channels, one of `ends`. It is a linear layer, except
            in some classifiers.
        positions: Number of tokens that have a position, where positions are a table; else None.
    """

    num_blocks: int
    blocks: str
    embeddings: tuple[str, ...]
    ends: tuple[str, ...]
    shared: tuple[str, ...]
    token_embeddings: str
    head: str
    positions: int | None

    @property
    def embedding_weight(self) -> str:
        """Name of the token embeddings' tensor [V, C]."""
        return f"{self.token_embeddings}.weight"

    @property
    def head_weight(self) -> str:
        """Name of the head's tensor [V, C]."""
        return f"{self.head}.weight"

    @property
    def new_ends(self) -> tuple[str, ...]:
        """Modules that a model without classes lacks: the head, and BERT's pooler before it."""
        return (self.head, *(end for end in self.ends if end.endswith(_POOLER)))

    def part_of(self, name: str) -> str:
        """Return the part of a tensor by its name: `EMBED_PART` or another part's name."""
        if is_below(name, [self.blocks]):
            return block_part(int(name.removeprefix(f"{self.blocks}.").partition(".")[0]))
        if is_below(name, self.shared):
            return SHARED_PART
        return EMBED_PART if is_below(name, self.embeddings) else HEAD_PART


def block_part(index: int) -> str:
    """Return the name of a block, for messages and `tensor_names`."""
    return f"block {index}"


# ---- values that follow from the config alone

# These settings change no result with given weights, and differ between copies of a model.
_NO_SETTINGS = ("architectures", "dtype", "tie_word_embeddings", "transformers_version")


def settings_text(config: ModelConfig) -> str:
    """Return a config's fields as canonical text.

    Equal texts and weights mean equal computation.
    """
    fields = config.to_diff_dict()
    settings = {k: v for k, v in fields.items() if k not in _NO_SETTINGS and not k.startswith("_")}
    return json.dumps(settings, sort_keys=True, default=str)


def check_model_type(model_type: str, task: Task) -> None:
    """Check that transformers has models of this type for a task.

    Raises:
        BadModel: There are none.
    """
    head = head_of(task)
    if model_type not in head.class_names:
        raise BadModel(
            f"architecture '{model_type}': expected {head.words} of transformers builds, such as "
            f"{head.examples}; docs/reference/models.md has the others"
        )


def check_seq_length(architecture: Architecture, seq_length: int) -> None:
    """Refuse samples that are longer than the model's positions.

    Raises:
        BadOption: The samples are too long.
    """
    longest = architecture.positions
    if longest is not None and seq_length > longest:
        raise BadOption(f"--seq-length {seq_length}: the model has {longest} positions")


# ---- a model and the findings about it

BlockInputs = Sequence[tuple[str, object]]
"""Inputs of a block by name; for an unchanged weight of the model, its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """A model without its weights, and the findings of its run.

    Attributes:
        skeleton: Model of `build_skeleton`; change only copies of it.
        architecture: Names of its parts.
        block_inputs: Inputs of each block beside its hidden states.
    """

    skeleton: PreTrainedModel
    architecture: Architecture
    block_inputs: Sequence[BlockInputs]

    def cut(self, layers: LayerRange) -> PreTrainedModel:
        """Return a stage of the model: its blocks, and the modules around them that it needs.

        Raises:
            BadModel: The stage's blocks would get other inputs than in the whole model.
        """
        found, stage = self.architecture, copy.deepcopy(self.skeleton)
        around = (*found.embeddings, *found.shared, *found.ends)
        absent = (*found.embeddings,) if layers.start > 0 else ()
        absent += (*found.ends,) if layers.stop < found.num_blocks else ()
        cut_blocks(stage, found.blocks, layers, absent)
        own = _traced(stage, found.blocks, tuple(p for p in around if p not in absent), layers)
        _compare(stage, self.block_inputs[layers.start : layers.stop], own.given)
        return stage


def anatomy_of(config: ModelConfig, task: Task) -> Anatomy:
    """Build a model and find its parts; equal configs share the result.

    A peer needs the anatomy for its checkpoint and again for its stage; with 80 blocks it takes
    half a second.

    Raises:
        BadModel: The model cannot be cut; the message has the reason.
        ValueError: transformers cannot build a model of this config.
    """
    return _anatomy(_AnatomyKey(settings_text(config), task, config))


@dataclass(frozen=True, slots=True)
class _AnatomyKey:
    """Cache key of an anatomy: the settings of a config, and the task."""

    settings: str
    task: Task
    config: ModelConfig = field(compare=False)


@lru_cache(maxsize=4)
def _anatomy(key: _AnatomyKey) -> Anatomy:
    found = _taken_apart(build_skeleton(key.config, key.task))
    count = found.architecture.num_blocks
    if count > 1:  # a trial cut, before a peer hosts a stage of it
        fill_buffers(found.cut(LayerRange(count // 2, count)))
    return found


def _taken_apart(skeleton: PreTrainedModel) -> Anatomy:
    _check_kind(skeleton)
    blocks = _blocks_of(skeleton)
    around = tuple(_around(skeleton, blocks))
    head = _head_of(skeleton)
    table = _name_of(skeleton, skeleton.get_input_embeddings(), "token embeddings")
    fill_buffers(skeleton, but=(blocks, *around))
    trace = _traced(skeleton, blocks, around, LayerRange(0, skeleton.config.num_hidden_layers))
    shared = tuple(name for name in around if name in trace.shared)
    before, after = _sides(skeleton, trace.called, [one for one in around if one not in shared])
    if not (is_below(table, before) and is_below(head, after)):
        raise _refused(skeleton, f"expected {table} in front of all blocks, {head} behind them")
    architecture = Architecture(
        num_blocks=skeleton.config.num_hidden_layers,
        blocks=blocks,
        embeddings=before,
        ends=after,
        shared=shared,
        token_embeddings=table,
        head=head,
        positions=_positions(skeleton, table, before),
    )
    return Anatomy(skeleton=skeleton, architecture=architecture, block_inputs=trace.given)


# ---- the role of each module


def _refused(skeleton: PreTrainedModel, why: str) -> BadModel:
    return uncuttable_error(skeleton.config, why)


def _check_kind(skeleton: PreTrainedModel) -> None:
    if skeleton.config.get_text_config() is not skeleton.config:
        raise _refused(skeleton, "expected one text model; it has other modules beside it")
    if getattr(skeleton.config, "layerdrop", 0.0):
        raise _refused(skeleton, "expected all blocks in every step; its layerdrop leaves some out")


def _blocks_of(skeleton: PreTrainedModel) -> str:
    """Return the name of the list of blocks, by its length and place in the base."""
    count = skeleton.config.num_hidden_layers
    found: list[str] = []
    prefix, base = base_of(skeleton)
    for name, module in base.named_modules(prefix=prefix):
        if isinstance(module, nn.ModuleList) and len(module) == count and not is_below(name, found):
            found.append(name)
    planned = [name for name in found if name.rpartition(".")[2] in _pipeline_plan(skeleton)]
    if len(found) != 1 and len(planned) != 1:
        told = ", ".join(found) or "none"
        raise _refused(skeleton, f"expected one list of its {count} blocks, found {told}")
    return found[0] if len(found) == 1 else planned[0]


def _pipeline_plan(skeleton: PreTrainedModel) -> Mapping[str, object]:
    """Return transformers' own pipeline plan by part; about half the families have one."""
    plan: Mapping[str, object] | None = skeleton.config.base_model_pp_plan
    return plan or {}


def _around(skeleton: PreTrainedModel, blocks: str) -> Iterator[str]:
    """Yield modules around the blocks that belong to one stage: with weights, or dropout."""
    holders = [""]
    for piece in blocks.split(".")[:-1]:
        holders.append(f"{holders[-1]}.{piece}".lstrip("."))
    for holder in holders:
        module = skeleton.get_submodule(holder)
        for name, _ in module.named_parameters(recurse=False):
            raise _refused(skeleton, f"its weight {holder}.{name} belongs to no module of its own")
        for name, child in module.named_children():
            full = f"{holder}.{name}".lstrip(".")
            is_one_stages = bool(child.state_dict()) or isinstance(child, nn.Dropout)
            if is_one_stages and full not in (*holders, blocks):
                yield full


def _name_of(skeleton: PreTrainedModel, module: nn.Module | None, what: str) -> str:
    names = [str(name) for name, candidate in skeleton.named_modules() if candidate is module]
    if names and isinstance(getattr(module, "weight", None), nn.Parameter):
        return names[0]
    raise _refused(skeleton, f"expected {what} with a weight, found {type(module).__name__}")


def _head_of(skeleton: PreTrainedModel) -> str:
    """Return the name of the module that computes logits of tokens, or of classes."""
    if skeleton.get_output_embeddings() is not None:
        return _name_of(skeleton, skeleton.get_output_embeddings(), "output embeddings")
    base, _ = base_of(skeleton)
    beside = [name for name, child in skeleton.named_children() if child.state_dict()]
    names: list[str] = [name for name in beside if name != base and not name.endswith(_POOLER)]
    if len(names) != 1:
        raise _refused(
            skeleton, f"expected one head of classes, found {', '.join(names) or 'none'}"
        )
    return names[0]


def _sides(
    skeleton: PreTrainedModel, called: list[str], around: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules in front of the blocks, and those behind them or never called."""
    first, last = called.index(_BLOCK), len(called) - called[::-1].index(_BLOCK)
    before, after = [name for name in called[:first] if name in around], called[last:]
    for name in around:
        if name in called[first:last] or (name in before and name in after):
            raise _refused(
                skeleton,
                f"expected all but its blocks in front of these or behind them; {name} is between "
                f"two of them, or at both ends",
            )
    return tuple(dict.fromkeys(before)), tuple(name for name in around if name not in before)


def _positions(skeleton: PreTrainedModel, table: str, before: Iterable[str]) -> int | None:
    longest: int | None = getattr(skeleton.config, "max_position_embeddings", None)
    if longest is None:
        return None
    tables = [
        module
        for name, module in skeleton.named_modules()
        if isinstance(module, nn.Embedding) and is_below(name, before) and name != table
    ]
    buffers = (buffer.shape for _, buffer in skeleton.named_buffers())
    if not tables and not any(longest in shape for shape in buffers):
        return None
    # The first rows of RoBERTa's table are for padding.
    padding = (one.padding_idx for one in tables if one.num_embeddings == longest)
    return longest - max((index + 1 for index in padding if index is not None), default=0)


# ---- a run of the modules around the blocks

_BLOCK = "block"
_NUM_SAMPLES, _NUM_TOKENS = 2, 5
# Blocks return the hidden states, or, in older families, a tuple that begins with them.
_FORMS: tuple[Callable[[Tensor], object], ...] = (
    lambda hidden: hidden,
    lambda hidden: (hidden,),
    lambda hidden: (hidden, None),
    lambda hidden: [hidden],
)


@dataclass(slots=True)
class _Trace:
    """Record of a model's run with blocks that do nothing.

    Attributes:
        called: Names of modules around the blocks in order of their calls, with `_BLOCK` for a
            block.
        given: Inputs of each block beside its hidden states.
        shared: Names of modules whose weights alone determine some of these inputs.
    """

    called: list[str] = field(default_factory=list)
    given: list[BlockInputs] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)


def _traced(
    skeleton: PreTrainedModel, blocks: str, around: tuple[str, ...], layers: LayerRange
) -> _Trace:
    """Return the trace of a model or stage.

    It must be the same for tokens and for hidden states.
    """
    skeleton.eval()
    shape = (_NUM_SAMPLES, _NUM_TOKENS)
    hidden = torch.zeros(*shape, embedded_size(skeleton, layers), requires_grad=True).clone()
    later = _run(skeleton, blocks, around, partial(base_of(skeleton)[1], inputs_embeds=hidden))
    trace = later
    if layers.start == 0:
        tokens = torch.ones(shape, dtype=torch.int64)
        trace = _run(skeleton, blocks, around, partial(skeleton, input_ids=tokens))
        _compare(skeleton, trace.given, later.given)
    if len(trace.given) != layers.stop - layers.start:
        raise _refused(skeleton, "expected each block to be called once, one after the other")
    return trace


def _run(
    skeleton: PreTrainedModel, blocks: str, around: tuple[str, ...], forward: Callable[..., object]
) -> _Trace:
    # Only the texts of exceptions are stored. A traceback and this frame would hold each other, and
    # the tensors of the trace, until the next garbage collection.
    failures: list[str] = []
    for form in _FORMS:
        trace = _Trace()
        try:
            with _probed(skeleton, blocks, around, trace, form):
                forward(use_cache=False)
        except BadModel:
            raise
        except Exception as exc:  # noqa: BLE001 - a family's own code may raise anything
            failures.append(f"{type(exc).__name__}: {exc}".partition("\n")[0])
        else:
            return trace
    raise _refused(
        skeleton, f"the modules around its blocks do not run without them ({failures[0]})"
    )


@contextmanager
def _probed(
    skeleton: nn.Module,
    blocks: str,
    around: tuple[str, ...],
    trace: _Trace,
    form: Callable[[Tensor], object],
) -> Iterator[None]:
    with ExitStack() as stack:
        for index, block in enumerate(skeleton.get_submodule(blocks).children()):
            probe = partial(_block_probe, skeleton, around, trace, form, index)
            _replace_forward(stack, block, probe)
        for name in around:
            module = skeleton.get_submodule(name)
            _replace_forward(stack, module, partial(_weightless, trace, name, module.forward))
        yield


def _replace_forward(stack: ExitStack, module: nn.Module, forward: Callable[..., object]) -> None:
    module.forward = forward
    stack.callback(vars(module).pop, "forward")


def _block_probe(
    skeleton: PreTrainedModel,
    around: Collection[str],
    trace: _Trace,
    form: Callable[[Tensor], object],
    index: int,
    *inputs: object,
    **named: object,
) -> object:
    given = {**{str(place): value for place, value in enumerate(inputs)}, **named}
    hidden = given.pop(next(iter(given)))
    expected = (_NUM_SAMPLES, _NUM_TOKENS, skeleton.config.hidden_size)
    if not isinstance(hidden, Tensor) or hidden.shape != expected:
        got = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        if index == 0:
            raise _refused(
                skeleton, f"expected its blocks to take hidden states {list(expected)}, got {got}"
            )
        raise ValueError(f"block {index} is given {got}")  # another form may fit
    if index != len(trace.given):
        raise _refused(skeleton, "expected each block to be called once, one after the other")
    trace.called.append(_BLOCK)
    leaves = _leaves(given)
    trace.given.append([(name, _name_or_value(skeleton, value)) for name, value in leaves])
    for name, value in leaves:
        if isinstance(value, Tensor) and value.requires_grad:
            makers = _makers(skeleton, around, value)
            if makers is None:
                raise _refused(
                    skeleton,
                    f"expected its blocks to take hidden states alone of what depends on the text; "
                    f"they take {name} too",
                )
            trace.shared |= makers
    return form(hidden)


def _weightless(
    trace: _Trace, name: str, own: Callable[..., object], *inputs: object, **named: object
) -> object:
    """Run a module without memory on real tensors; return zeros in the shapes of its results."""
    trace.called.append(name)
    with torch.device("meta"):
        result = own(*tree_map(_on_meta, inputs), **tree_map(_on_meta, named))
    given = [value for _, value in _leaves({"inputs": inputs, "named": named})]
    return tree_map(
        partial(_zeros, name, [one for one in given if isinstance(one, Tensor)]), result
    )


def _on_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value


def _zeros(module: str, given: list[Tensor], value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return torch.zeros(value.shape, dtype=value.dtype)
    made: Tensor = _Made.apply(module, value, _WEIGHT, *given)  # type: ignore[no-untyped-call]
    return made.clone()  # some families modify their inputs in place


_WEIGHT = torch.zeros((), requires_grad=True)
"""Stand-in for all weights of a module without memory."""


class _MadeBy(Protocol):
    """Origin of a result: its module, and whether it depends on the text."""

    module: str
    is_of_text: bool


class _Made(torch.autograd.Function):
    """Zeros in the place of a module's result, which record their origin.

    Inputs that are not floating-point numbers depend on the text: tokens, or their positions.
    """

    @staticmethod
    def forward(ctx: _MadeBy, module: str, result: Tensor, *given: Tensor) -> Tensor:
        ctx.module = module
        ctx.is_of_text = not all(one.is_floating_point() for one in given)
        return torch.zeros(result.shape, dtype=result.dtype)


def _makers(
    skeleton: PreTrainedModel, around: Collection[str], value: Tensor
) -> frozenset[str] | None:
    """Return the modules whose weights alone determine a tensor; None if it depends on the text."""
    names = {id(weight): name for name, weight in skeleton.named_parameters()}
    found: set[str] = set()
    left, seen = [get_gradient_edge(value).node], set[object]()
    while left:
        node: Any = left.pop()
        seen.add(node)
        if getattr(node, "is_of_text", False):
            return None
        if hasattr(node, "module"):
            found.add(node.module)
        if hasattr(node, "variable") and node.variable is not _WEIGHT:
            owners = [one for one in around if is_below(names.get(id(node.variable), ""), [one])]
            if not owners:
                return None
            found |= set(owners)
        left += [one for one, _ in node.next_functions if one is not None and one not in seen]
    return frozenset(found)


def _leaves(given: Mapping[str, object]) -> list[tuple[str, object]]:
    flat, _ = tree_flatten_with_path(dict(given))
    return [(keystr(path), value) for path, value in flat]


def _name_or_value(skeleton: PreTrainedModel, value: object) -> object:
    if not isinstance(value, nn.Parameter):
        return value
    return next((name for name, own in skeleton.named_parameters() if own is value), value)


def _compare(
    skeleton: PreTrainedModel, whole: Sequence[BlockInputs], own: Sequence[BlockInputs]
) -> None:
    for one, other in zip(whole, own, strict=False):
        for (name, value), (_, again) in zip(one, other, strict=False):
            if not _is_same(value, again):
                raise _refused(
                    skeleton,
                    f"expected its blocks to take hidden states alone; they take {name} too, "
                    f"which a stage in the middle cannot make",
                )


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return type(one) is type(other) and (not isinstance(one, int | float | str) or one == other)
