"""The blocks of one stage as a torch module, named as Hugging Face does. Knows no optimizer.

Shape suffixes: b samples, t tokens, c channels, v vocabulary; n rows (samples times tokens),
i inputs, o outputs of a linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.protocol.spec.digest import seed_of
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.sample_rows import SECOND
from swarm_ft.protocol.spec.tasks import CausalLm, Task
from swarm_ft.stage.architecture import (
    EMBED_PART,
    HEAD_PART,
    SHARED_PART,
    anatomy_of,
    block_part,
)
from swarm_ft.stage.base import Lengths, is_packed, tokens_of
from swarm_ft.stage.device import drawing_apart
from swarm_ft.stage.forms import own_linears, packing_of, weight_of
from swarm_ft.stage.heads import head_of
from swarm_ft.stage.packed import (
    MASKED_TOKENS,
    TRIED_SIZE,
    Outputs,
    apart,
    masks_documents,
    together,
)
from swarm_ft.stage.rope import LengthDependence
from swarm_ft.stage.skeleton import (
    RECORDED,
    ModelConfig,
    base_of,
    embedded_size,
    fill_buffers,
    sees_all,
    tells_texts,
)

# ---- dropout that draws the same numbers in every replay


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutSeeds:
    """Seeds of one microbatch in one step, one for each block and one for the embeddings.

    Each place has its own seed and no place reads the generator's state of another, so the order
    in which blocks, stages or microbatches are computed, or computed again, changes nothing.
    Torch's CPU generator is one for the whole process: only one thread of it may draw.

    Attributes:
        part: of the microbatch, where its documents are computed in several parts.
    """

    seed: int
    step: StepNumber
    microbatch: MicrobatchIndex
    part: int = 0

    def draw_at(self, place: str) -> None:
        """Seed torch's generators for what comes now.

        Args:
            place: a part's name, see `architecture.block_part`.
        """
        part = f"/{self.part}" * (self.part > 0)
        torch.manual_seed(seed_of(f"{self.seed}/{self.step}/{self.microbatch}/{place}{part}"))


# ---- the stage


_CAUSAL_LM = CausalLm()
_log = get_logger(__name__)


class StageModule(nn.Module):
    """Blocks `layers`, with the embeddings at the model's start and norm and head at its end.

    It computes by transformers' own forward, in a model that is cut to what the stage
    needs. Built without memory; `materialise` gives it its weights. Parameters have the names of
    the whole model's state dict, so any stage's weights are a shard of a Hugging Face checkpoint.

    Attributes:
        num_outputs: number of classes or words that a target is one of.
        recomputes: of a forward, blocks' inputs alone are kept; a backward runs each block again.

    Raises:
        BadModel: the model cannot be cut into stages.
    """

    def __init__(self, config: ModelConfig, layers: LayerRange, task: Task = _CAUSAL_LM) -> None:
        super().__init__()
        anatomy = anatomy_of(config, task)
        self._head = head_of(task)
        self.num_outputs = task.num_outputs(config.vocab_size)
        self.layers = layers
        self.architecture = anatomy.architecture
        self.is_first = layers.start == 0
        self.is_last = layers.stop == self.architecture.num_blocks
        model = anatomy.cut(layers)
        # Not as a submodule, which would put its name in front of all others.
        self._unnamed = (model,)
        for name, part in model.named_children():
            self.add_module(name, part)
        self._passage = _Passage(layers, embedded_size(model, layers))
        self._by_length = LengthDependence(model)
        self.recomputes = False
        self._masks_documents: bool | None = None
        model.get_submodule(self.architecture.blocks).called_by = self._passage.door

    @property
    def causal(self) -> PreTrainedModel:
        """The model with its head, as far as the stage has it."""
        return self._unnamed[0]

    def materialise(
        self, tensors: dict[str, Tensor], device: torch.device, *, tie: bool = False
    ) -> None:
        """Take these tensors as weights, without a copy where they lie on `device`.

        Args:
            tensors: exactly this stage's, as `Checkpoint.load` gives them.
            device: where the stage computes.
            tie: one parameter for embeddings and head; only where one stage has both.

        Raises:
            BadModel: a buffer that is in no checkpoint cannot be computed.
        """
        self.load_state_dict(tensors, strict=True, assign=True)
        fill_buffers(self.causal)
        if device.type != "cpu":  # where all is
            self.to(device)
        if tie:
            self.get_submodule(self.architecture.head).weight = self.embedding_weight

    def train_only(self, layers: LayerRange) -> None:
        """Freeze all but these blocks.

        The embeddings train with the model's first block, and so does what all blocks share; norm
        and head with its last.
        """
        whole = self.architecture.num_blocks
        parts = {block_part(index) for index in range(layers.start, layers.stop)}
        parts |= {EMBED_PART, SHARED_PART} if layers.start == 0 else set()
        parts |= {HEAD_PART} if layers.stop == whole else set()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.architecture.part_of(name) in parts)

    def trainable(self) -> dict[str, nn.Parameter]:
        """What is trained, by name; of all else there is no gradient and no moment.

        Optimizer, gradients, their norm, state and reduction go by this list.
        """
        own = self.named_parameters()
        return {name: parameter for name, parameter in own if parameter.requires_grad}

    @property
    def embedding_weight(self) -> nn.Parameter:
        """Token embeddings [V, C]; first stage only."""
        return self.get_parameter(self.architecture.embedding_weight)

    @property
    def head_weight(self) -> nn.Parameter:
        """The head [V, C]; last stage only."""
        return self.get_parameter(self.architecture.head_weight)

    @property
    def sees_all(self) -> bool:
        """See `Ending`."""
        return sees_all(self.causal.config)

    def forward(
        self,
        x: Tensor,
        dropout: DropoutSeeds | None = None,
        lengths: Lengths = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """From tokens [B, T] (first stage) or hidden [B, T, C] to hidden [B, T, C].

        Args:
            x: int64 tokens, see `Samples.token_ids`, or float32 hidden; on the stage's device.
            dropout: seeds; None where the module is in eval mode, which draws nothing.
            lengths: see `Lengths`.
            cache: of what stands in front of these tokens, see `stage.kept`; it grows by them.
        """
        base = base_of(self.causal)[1]
        if cache is not None:
            return self._passed(partial(base, past_key_values=cache), x, dropout, cache)[0]
        return self._computed(base, x, dropout, lengths)[0]

    def routed(self, x: Tensor, dropout: DropoutSeeds | None, lengths: Lengths) -> Outputs:
        """As `forward`, and what the routers of the stage's blocks give, [B T, experts] each."""
        base = partial(base_of(self.causal)[1], output_router_logits=True)
        return self._computed(base, x, dropout, lengths)

    def _computed(
        self, base: Callable[..., object], x: Tensor, dropout: DropoutSeeds | None, lengths: Lengths
    ) -> Outputs:
        if lengths is None or not (is_packed(lengths) or self._by_length.parts(tokens_of(lengths))):
            return self._passed(self._masked(base, x, lengths), x, dropout)

        def run(x: Tensor, part: int = 0, **named: Tensor) -> Outputs:
            seeds = None if dropout is None else replace(dropout, part=part)
            return self._passed(partial(base, **named), x, seeds)

        if self._by_length:
            return apart(run, x, lengths, self._by_length.kind_of)
        is_together = x.shape[1] <= MASKED_TOKENS and self.masks_documents
        return (together if is_together else apart)(run, x, lengths)

    @property
    def masks_documents(self) -> bool:
        """Whether transformers' own masks keep the documents of a sample apart in these blocks."""
        if self._masks_documents is None:
            was_training = self.training
            self.eval()
            self._masks_documents = self._try_masks()
            self.train(was_training)
        return self._masks_documents

    def _try_masks(self) -> bool:
        base, config = base_of(self.causal)[1], self.causal.config
        x = torch.arange(math.prod(TRIED_SIZE)).view(TRIED_SIZE) % config.vocab_size
        if not self.is_first:
            random = torch.Generator().manual_seed(0)
            x = torch.randn(*TRIED_SIZE, config.hidden_size, generator=random)

        def run(x: Tensor, part: int = 0, **named: Tensor) -> Outputs:
            return self._passed(partial(base, **named), x, None)

        does = masks_documents(run, x.to(next(self.parameters()).device))
        if not does:
            _log.info(
                "documents-apart layers=%s: blocks of '%s' do not keep documents of one sample "
                "apart; each is computed as a sample of its own, which takes longer",
                self.layers,
                config.model_type,
            )
        return does

    def _passed(
        self,
        base: Callable[..., object],
        x: Tensor,
        dropout: DropoutSeeds | None,
        cache: Cache | None = None,
    ) -> Outputs:
        self._passage.recomputes = self.recomputes
        self._by_length.forget()
        with nullcontext() if dropout is None else drawing_apart(x.device):
            if self.is_first:
                passed = self._passage.through(self._reading(base, x), None, dropout, cache)
            else:
                entered = self._passage.without_input(base, x)
                passed = self._passage.through(entered, x, dropout, cache)
        result, hidden = passed
        return hidden, tuple(getattr(result, RECORDED, None) or ())

    def _reading(self, base: Callable[..., object], tokens_bt: Tensor) -> Callable[..., object]:
        """The base, given tokens, and of which text each is if it learned to tell two."""
        token_ids = tokens_bt % SECOND
        if not tells_texts(self.causal.config):
            return partial(base, input_ids=token_ids)
        return partial(base, input_ids=token_ids, token_type_ids=tokens_bt // SECOND)

    def _masked(
        self, base: Callable[..., object], x: Tensor, lengths: Lengths
    ) -> Callable[..., object]:
        """The base, whose tokens are to see none of what pads a sample."""
        if lengths is None or not self.sees_all:
            return base
        return partial(base, attention_mask=tokens_among(x, lengths).long())

    def select(self, hidden_btc: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
        """Select what predicts a target, see `Head.select`.

        Args:
            hidden_btc: the last block's output.
            labels_bt: int64, see `Samples`.
        """
        return self._head.select(self, hidden_btc, labels_bt)

    def judge(self, rows: Tensor) -> Tensor:
        """Compute logits [n, K] in float32 of some rows that `select` gave."""
        with drawing_apart(rows.device) if self.training else nullcontext():
            return self._head.judge(self, rows).float()

    def loss_sum(self, hidden_btc: Tensor, labels_bt: Tensor) -> Tensor:
        """Sum the cross-entropies of all targets in float32, with whole logits."""
        rows, targets_n = self.select(hidden_btc, labels_bt)
        return cross_entropy(self.judge(rows), targets_n, reduction="sum")

    def logits(self, hidden_btc: Tensor) -> Tensor:
        """See `Ending`."""
        logits: Tensor = self._passage.beyond(self.causal, hidden_btc).logits
        return logits

    def normed(self, hidden_btc: Tensor) -> Tensor:
        """See `Ending`."""
        _, base = base_of(self.causal)
        normed: Tensor = self._passage.beyond(base, hidden_btc).last_hidden_state
        return normed

    def scores(self, normed: Tensor) -> Tensor:
        """See `Ending`."""
        scores: Tensor = self.get_submodule(self.architecture.head)(normed)
        return scores


def tokens_among(x: Tensor, lengths: Sequence[int | tuple[int, ...]]) -> Tensor:
    """Bool [B, T]: which places of [B, T, ...] are tokens, and do not pad samples."""
    places = torch.arange(x.shape[1], device=x.device)
    return places < torch.tensor(tokens_of(lengths), device=x.device)[:, None]


class _Passage:
    """Enters and leaves transformers' forward at the blocks of a stage.

    That forward goes from tokens to logits. What it does in front of the stage's blocks is nothing,
    but for the embeddings of the first stage, and what all blocks share. What it does behind them,
    and another stage does too, is done without a graph, and reaches nobody.
    """

    def __init__(self, layers: LayerRange, embedded_size: int) -> None:
        self._first, self._last = layers.start, layers.stop - 1
        self._embedded_size = embedded_size
        self.recomputes = False
        self._is_skipped = False
        self._with_graph = True
        self._form: Callable[[Tensor], object] = _form_of(None)
        self._hidden: Tensor | None = None
        self._dropout: DropoutSeeds | None = None

    def through(
        self,
        base: Callable[..., object],
        hidden: Tensor | None,
        dropout: DropoutSeeds | None,
        cache: Cache | None = None,
    ) -> tuple[object, Tensor]:
        """What the base makes of its blocks, and what the last of these gives.

        Args:
            base: the model without its head, with its input.
            hidden: what the first block is to take; None for what the base gives it.
            dropout: seeds for what draws.
            cache: what the base was given; None if it is to keep nothing.
        """
        self._hidden, self._dropout, self._is_skipped = hidden, dropout, False
        if dropout is not None:
            dropout.draw_at(EMBED_PART)
        return self._run(base, leads_in=True, use_cache=cache is not None)

    def beyond(self, model: Callable[..., Any], hidden: Tensor) -> Any:  # noqa: ANN401
        """What a causal model makes of what its last block gave, in transformers' own form."""
        self._hidden, self._is_skipped = hidden, True
        return self._run(self.without_input(model, hidden), leads_in=False)[0]

    def without_input(self, model: Callable[..., object], hidden: Tensor) -> Callable[..., object]:
        """A forward pass that embeds nothing."""
        # Not `hidden` itself: some families scale what they are given in place.
        shape = (*hidden.shape[:-1], self._embedded_size)
        return partial(model, inputs_embeds=hidden.new_zeros(shape))

    def _run(
        self, forward: Callable[..., object], *, leads_in: bool, use_cache: bool = False
    ) -> tuple[object, Tensor]:
        """The result, and the hidden states; what is in front of the blocks counts, or not."""
        self._with_graph = torch.is_grad_enabled()
        try:
            with torch.set_grad_enabled(self._with_graph and leads_in):
                result = forward(use_cache=use_cache)
            if self._hidden is None:
                raise OutOfTurn("the model's base went by its blocks")
            return result, self._hidden
        finally:
            self._hidden = self._dropout = None

    def door(self, index: int, block: nn.Module) -> _Door:
        """What a base calls for a block."""
        return _Door(self, index, block)

    def cross(
        self, index: int, block: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
    ) -> object:
        """A block is called."""
        if index == self._first:
            torch.set_grad_enabled(self._with_graph)
            inputs, named = self._entered(inputs, named)
        if self._is_skipped and self._hidden is not None:
            return self._form(self._hidden)
        if self._dropout is not None:
            self._dropout.draw_at(block_part(index))
        if self.recomputes and torch.is_grad_enabled():
            # What draws begins again from the same seed, and the generators are put back.
            draws = self._dropout is not None
            run = partial(block, **named)
            result = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=draws)
        else:
            result = block(*inputs, **named)
        if index == self._last:
            self._form = _form_of(result)
            self._hidden = result[0] if isinstance(result, tuple | list) else result
            torch.set_grad_enabled(False)
        return result

    def _entered(
        self, inputs: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if self._hidden is None:
            return inputs, named
        if inputs:
            return (self._hidden, *inputs[1:]), named
        return inputs, {**named, next(iter(named)): self._hidden}


def _form_of(result: object) -> Callable[[Tensor], object]:
    """How a block returns hidden states; in older families, with more behind them."""
    if not isinstance(result, tuple | list):
        return lambda hidden: hidden
    kind, more = type(result), [None] * (len(result) - 1)
    return lambda hidden: kind([hidden, *more])


@dataclass(frozen=True, slots=True)
class _Door:
    """A block as its base sees it."""

    passage: _Passage
    index: int
    block: nn.Module

    def __call__(self, *inputs: object, **named: object) -> object:
        return self.passage.cross(self.index, self.block, inputs, named)

    def __getattr__(self, name: str) -> object:
        return getattr(self.block, name)


# ---- linear layers that compute their weights' gradients later than their input's
#
# The stage upstream waits for the gradient of the input; nobody waits for those of the weights,
# which a stage can compute when it would idle (Qi et al. 2023, arXiv 2401.10241). What autograd
# does in one go is cut in two here, with the same products of the same operands, so both ways end
# with the same bits. A frozen layer is left with the gradient of its input alone, for which
# nothing of the microbatch is kept.


LARGE_BYTES = 64 << 20
"""Size of a weight above which no second tensor of its size is made."""
BLOCK_BYTES = 4 << 20
"""Size of the part of such a weight that is computed with at a time; caches of CPUs hold it."""


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """What a backward pass left of one layer: the operands of its weight's gradient."""

    layer: nn.Module
    x_ni: Tensor
    gradient_no: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""
        return self.x_ni, self.gradient_no

    def accumulate(self) -> None:
        """Add the gradients of weight and bias to theirs."""
        x_ni, gradient_no = self.tensors
        is_linear = isinstance(self.layer, nn.Linear)
        factors = (gradient_no.t(), x_ni) if is_linear else (x_ni.t(), gradient_no)
        _add_product(self.layer.get_parameter("weight"), *factors)
        if self.layer.bias is not None:
            _add(self.layer.get_parameter("bias"), gradient_no.sum(0))


class DeferredLinears:
    """The linear layers of a module, whose backward pass leaves the weights' gradients undone.

    Layers that share their weight with another module are left as they are: autograd sums a
    weight's gradients over its roles before it adds them to what is there.

    Args:
        module: has its weights, and keeps them the same objects. Its layers compute through this
            one until `restore`.
        at_once: a backward pass computes them itself: kept back, their operands would take the
            memory of all that was not kept of a forward.
    """

    def __init__(self, module: nn.Module, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._left: list[WeightProduct] = []
        self._casts: dict[nn.Parameter, Tensor] = {}
        # Weakly: a stage that is let go of must give its memory back at once.
        self._layers = [ref(layer) for layer in own_linears(module).values()]
        for weak in self._layers:
            _there(weak).forward = partial(self._forward, weak)

    def restore(self) -> None:
        """Have the layers compute as their classes do."""
        for weak in self._layers:
            del _there(weak).forward

    def forget(self) -> None:
        """Weights have changed perhaps, and what was left is of no use any more."""
        self._left.clear()
        self._casts.clear()

    def take(self) -> list[WeightProduct]:
        """What backward passes left since the last call, in their order."""
        taken, self._left[:] = list(self._left), []
        return taken

    @property
    def cast_bytes(self) -> int:
        """Of the weights' copies in autocast's type, which all microbatches of a step share."""
        return sum(cast.nbytes for cast in self._casts.values())

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """A weight in the type that autocast computes in; copied once a step."""
        if parameter.dtype == dtype:
            return parameter.detach()
        if parameter.dtype != torch.float32:  # it is held in fewer bits for its memory's sake
            return parameter.detach().to(dtype)
        if parameter not in self._casts:
            self._casts[parameter] = parameter.detach().to(dtype)
        return self._casts[parameter]

    def weight_oi(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        """A layer's weight, outputs first, cast."""
        if packing_of(layer) is None:
            weight = self.cast(layer.get_parameter("weight"), dtype)
        else:
            weight = weight_of(layer).to(dtype)
        return weight if isinstance(layer, nn.Linear) else weight.t()

    def is_cast_in_blocks(self, layer: nn.Module, dtype: torch.dtype) -> bool:
        """Whether a weight is cast for each product, and the whole of it would be large."""
        weight = layer.get_parameter("weight")
        is_cast = packing_of(layer) is None and weight.dtype not in (dtype, torch.float32)
        return is_cast and weight.numel() * dtype.itemsize > LARGE_BYTES

    def is_in_blocks(self, layer: nn.Module, x: Tensor) -> bool:
        """Whether outputs are computed in blocks, which CPUs do faster where rows are few."""
        weight = layer.get_parameter("weight")
        is_large = weight.dtype == x.dtype and weight.nbytes > LARGE_BYTES
        is_plain = packing_of(layer) is None and x.device.type == "cpu"
        return (is_large and is_plain) or self.is_cast_in_blocks(layer, x.dtype)

    @contextmanager
    def deferring(self, layer: nn.Module) -> Iterator[None]:
        """Defer the gradient of a layer's weight that has another role as well."""
        is_plain = type(layer).forward is nn.Linear.forward
        if not is_plain or "forward" in vars(layer):
            yield
            return
        vars(layer)["forward"] = partial(self._forward, ref(layer))
        try:
            yield
        finally:
            del vars(layer)["forward"]

    def left(self, product: WeightProduct) -> None:
        """A backward pass came by."""
        if self._at_once:
            product.accumulate()
        else:
            self._left.append(product)

    def _forward(self, weak: ref[nn.Module], x: Tensor) -> Tensor:
        layer = _there(weak)
        # As autocast does, in front of the layer: it is the copy that is kept for the backward.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        output: Tensor = _Deferred.apply(x, layer.weight, layer, self)  # type: ignore[no-untyped-call]
        return output


class _Context(Protocol):
    """What torch and `_Deferred.forward` keep for the backward pass."""

    layer: nn.Module
    owner: DeferredLinears
    shape: torch.Size
    is_transposed: bool
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Deferred(torch.autograd.Function):
    """A layer whose backward pass is the input's gradient alone.

    The weight is an input so that the output has a gradient if the layer's input has none, and none
    if both are without.
    """

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, _weight: Tensor, layer: nn.Module, owner: DeferredLinears
    ) -> Tensor:
        x_ni = x.detach().reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x_ni)
        ctx.layer, ctx.owner, ctx.shape = layer, owner, x.shape
        ctx.is_transposed = x_ni.stride() == (1, len(x_ni))
        bias = None if layer.bias is None else owner.cast(layer.get_parameter("bias"), x.dtype)
        if owner.is_in_blocks(layer, x):
            output_no = _linear_in_blocks(x_ni, _outputs_first(layer), bias)
        else:
            output_no = linear(x_ni, owner.weight_oi(layer, x.dtype), bias)
        # Not a view, which nobody could change in place: some families do.
        shape = (*x.shape[:-1], output_no.shape[-1])
        output: Tensor = torch.ops.aten._unsafe_view(output_no, shape)  # noqa: SLF001
        return output

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        gradient_no = gradients[0].reshape(-1, gradients[0].shape[-1])
        if ctx.needs_input_grad[1]:
            (x_ni,) = ctx.saved_tensors
            ctx.owner.left(WeightProduct(ctx.layer, x_ni, gradient_no))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        if ctx.owner.is_cast_in_blocks(ctx.layer, gradient_no.dtype):
            gradient_ni = _product_in_blocks(gradient_no, _outputs_first(ctx.layer))
            return gradient_ni.view(ctx.shape), None, None, None
        weight_oi = ctx.owner.weight_oi(ctx.layer, gradient_no.dtype)
        if ctx.is_transposed:  # its gradient lies as it does, by which what comes next may round
            gradient_ni = weight_oi.t().mm(gradient_no.t()).t()
        else:
            gradient_ni = gradient_no.mm(weight_oi)
        return gradient_ni.view(ctx.shape), None, None, None


def _outputs_first(layer: nn.Module) -> Tensor:
    """A layer's weight [O, I], as it is held."""
    weight = layer.get_parameter("weight").detach()
    return weight if isinstance(layer, nn.Linear) else weight.t()


def _blocks(weight_oi: Tensor, by_output_no: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split a weight by its outputs, and what has a column for each."""
    num_rows = max(1, BLOCK_BYTES // (weight_oi.shape[1] * by_output_no.element_size()))
    parts = torch.split(weight_oi, num_rows), torch.split(by_output_no, num_rows, dim=1)
    return zip(*parts, strict=True)


def _linear_in_blocks(x_ni: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:
    """Compute `linear`, with some of the outputs at a time, whose weight is cast if need be."""
    output_no = x_ni.new_empty(len(x_ni), len(weight_oi))
    for rows, part in _blocks(weight_oi, output_no):
        torch.mm(x_ni, rows.to(x_ni.dtype).t(), out=part)
    return output_no if bias_o is None else output_no.add_(bias_o)


def _product_in_blocks(gradient_no: Tensor, weight_oi: Tensor) -> Tensor:
    """Compute the gradient of the input of `_linear_in_blocks`."""
    gradient_ni = gradient_no.new_zeros(len(gradient_no), weight_oi.shape[1])
    for rows, part in _blocks(weight_oi, gradient_no):
        gradient_ni.addmm_(part, rows.to(gradient_no.dtype))
    return gradient_ni


def _there(layer: ref[nn.Module]) -> nn.Module:
    found = layer()
    if found is None:
        raise OutOfTurn("a layer is asked to compute whose stage was let go of")
    return found


def _add_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Add a product to a gradient; in place if it is large, as a head's of hundreds of MiB."""
    if parameter.nbytes <= LARGE_BYTES:
        _add(parameter, left.mm(right))
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if left.dtype == parameter.dtype:
        parameter.grad.addmm_(left, right)
        return
    num_rows = max(1, BLOCK_BYTES // parameter.grad[0].nbytes)
    for rows, factor in zip(
        *(torch.split(one, num_rows) for one in (parameter.grad, left)), strict=True
    ):
        rows.add_(factor.mm(right))


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
