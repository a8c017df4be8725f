"""The blocks of one stage as a torch module, named as Hugging Face does. Knows no optimizer.

Shape suffixes: b samples, t tokens, c channels, v vocabulary; n rows (samples times tokens),
i inputs, o outputs of a linear layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers.pytorch_utils import Conv1D

from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.digest import digest_of
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.stage.architecture import (
    EMBED_PART,
    HEAD,
    ROTARY,
    ModelConfig,
    architecture_of,
    block_part,
    build_skeleton,
)

# ---- dropout that draws the same numbers in every replay


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutSeeds:
    """Seeds of one microbatch in one step, one for each block and one for the embeddings.

    Each place has its own seed and no place reads the generator's state of another, so the order
    in which blocks, stages or microbatches are computed, or computed again, changes nothing.
    Torch's CPU generator is one for the whole process: only one thread of it may draw.
    """

    seed: int
    step: StepNumber
    microbatch: MicrobatchIndex

    @contextmanager
    def drawing_at(self, place: str, device: torch.device) -> Iterator[None]:
        """Seed torch's generators for what runs inside; they are put back afterwards.

        Args:
            place: a part's name, see `architecture.block_part`.
            device: where the part computes.
        """
        text = f"{self.seed}/{self.step}/{self.microbatch}/{place}"
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            # 63 bits: what every torch generator takes.
            torch.manual_seed(int.from_bytes(digest_of(text.encode())[:8], "little") >> 1)
            yield


class StageModule(nn.Module):
    """Blocks `layers`, with the embeddings at the model's start and norm and head at its end.

    Built without memory; `materialise` gives it its weights. Parameters have the names of the
    causal model's state dict, so any stage's weights are a shard of a Hugging Face checkpoint.
    """

    def __init__(self, config: ModelConfig, layers: LayerRange) -> None:
        super().__init__()
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_hidden_layers
        self._architecture = architecture_of(config.model_type)
        skeleton = build_skeleton(config)
        whole = skeleton.get_submodule(self._architecture.base)
        self.add_module(self._architecture.base, self._own_part(whole, config))
        if self.is_last:
            self.add_module(HEAD, skeleton.get_submodule(HEAD))

    def _own_part(self, whole: nn.Module, config: ModelConfig) -> nn.Module:
        names = self._architecture
        own = nn.Module()
        for name in names.embeddings if self.is_first else ():
            own.add_module(name, whole.get_submodule(name))
        blocks = nn.ModuleDict()
        for index in range(self.layers.start, self.layers.stop):
            blocks[str(index)] = whole.get_submodule(f"{names.blocks}.{index}")
        own.add_module(names.blocks, blocks)
        if self.is_last:
            own.add_module(names.final_norm, whole.get_submodule(names.final_norm))
        if names.has_rotary:
            # Its frequencies are in no checkpoint: built again, off the meta device.
            own.add_module(ROTARY, type(whole.get_submodule(ROTARY))(config))
        return own

    def materialise(
        self, tensors: dict[str, Tensor], device: torch.device, *, tie: bool = False
    ) -> None:
        """Take these float32 tensors as weights, without a copy on the CPU, and move to `device`.

        Args:
            tensors: exactly this stage's, as `Checkpoint.load` gives them.
            device: where the stage computes.
            tie: one parameter for embeddings and head; only where one stage has both.
        """
        self.load_state_dict(tensors, strict=True, assign=True)
        self.to(device)
        if tie:
            self.get_submodule(HEAD).weight = self.embedding_weight

    @property
    def embedding_weight(self) -> nn.Parameter:
        """Token embeddings [V, C]; first stage only."""
        return self.get_parameter(self._architecture.embedding_weight)

    @property
    def head_weight(self) -> nn.Parameter:
        """The head [V, C]; last stage only."""
        return self.get_parameter(f"{HEAD}.weight")

    def forward(self, x: Tensor, dropout: DropoutSeeds | None = None) -> Tensor:
        """From tokens [B, T] (first stage) or hidden [B, T, C] to hidden [B, T, C].

        Args:
            x: int64 tokens or float32 hidden, on the stage's device.
            dropout: seeds; None where the module is in eval mode, which draws nothing.
        """
        base = self.get_submodule(self._architecture.base)

        def drawing_at(place: str) -> AbstractContextManager[None]:
            return nullcontext() if dropout is None else dropout.drawing_at(place, x.device)

        hidden_btc = x
        if self.is_first:
            with drawing_at(EMBED_PART):
                hidden_btc = self._architecture.embed(base, x)
        arguments = self._architecture.block_arguments(base, hidden_btc)
        for index, block in self._blocks(base):
            with drawing_at(block_part(index)):
                result = block(hidden_btc, **arguments)
            # Older transformers give a tuple.
            hidden_btc = result[0] if isinstance(result, tuple) else result
        return hidden_btc

    def loss_sum(self, hidden_btc: Tensor, tokens_bt: Tensor) -> Tensor:
        """Sum of the cross-entropies of all next tokens, B x (T - 1) of them, in float32.

        Args:
            hidden_btc: the last block's output.
            tokens_bt: int64; position t predicts token t + 1.
        """
        norm = self.get_submodule(f"{self._architecture.base}.{self._architecture.final_norm}")
        logits_btv: Tensor = self.get_submodule(HEAD)(norm(hidden_btc[:, :-1]))
        targets_bt = tokens_bt[:, 1:]
        return cross_entropy(
            logits_btv.float().flatten(0, 1), targets_bt.flatten(), reduction="sum"
        )

    def _blocks(self, base: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        blocks = base.get_submodule(self._architecture.blocks)
        return ((int(name), block) for name, block in blocks.named_children())


# ---- linear layers that compute their weights' gradients later than their input's
#
# The stage upstream waits for the gradient of the input; nobody waits for those of the weights,
# which a stage can compute when it would idle (Qi et al. 2023, arXiv 2401.10241). What autograd
# does in one go is cut in two here, with the same products of the same operands, so both ways end
# with the same bits.


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
        if isinstance(self.layer, nn.Linear):
            gradient = gradient_no.t().mm(x_ni)
        else:
            gradient = x_ni.t().mm(gradient_no)
        _add(self.layer.get_parameter("weight"), gradient)
        if self.layer.bias is not None:
            _add(self.layer.get_parameter("bias"), gradient_no.sum(0))


class DeferredLinears:
    """The linear layers of a module, whose backward pass leaves the weights' gradients undone.

    Layers that share their weight with another module are left as they are: autograd sums a
    weight's gradients over its roles before it adds them to what is there.

    Args:
        module: has its weights, and keeps them the same objects. Its layers compute through this
            one until `restore`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._left: list[WeightProduct] = []
        self._casts: dict[nn.Parameter, Tensor] = {}
        # Weakly: a stage that is let go of must give its memory back at once.
        self._layers = [ref(layer) for layer in _own_linears(module)]
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
        if parameter not in self._casts:
            self._casts[parameter] = parameter.detach().to(dtype)
        return self._casts[parameter]

    def weight_oi(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        """A layer's weight, outputs first, cast."""
        weight = self.cast(layer.get_parameter("weight"), dtype)
        return weight if isinstance(layer, nn.Linear) else weight.t()

    def left(self, product: WeightProduct) -> None:
        """A backward pass came by."""
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
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Deferred(torch.autograd.Function):
    """A layer whose backward pass is the input's gradient alone.

    The weight is an input so that the output has a gradient whether the layer's input has or not.
    """

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, _weight: Tensor, layer: nn.Module, owner: DeferredLinears
    ) -> Tensor:
        x_ni = x.detach().reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_ni)
        ctx.layer, ctx.owner, ctx.shape = layer, owner, x.shape
        bias = None if layer.bias is None else owner.cast(layer.get_parameter("bias"), x.dtype)
        output_no = linear(x_ni, owner.weight_oi(layer, x.dtype), bias)
        return output_no.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x_ni,) = ctx.saved_tensors
        gradient_no = gradients[0].reshape(len(x_ni), -1)
        ctx.owner.left(WeightProduct(ctx.layer, x_ni, gradient_no))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight_oi = ctx.owner.weight_oi(ctx.layer, x_ni.dtype)
        return gradient_no.mm(weight_oi).view(ctx.shape), None, None, None


def _there(layer: ref[nn.Module]) -> nn.Module:
    found = layer()
    if found is None:
        raise OutOfTurn("a layer is asked to compute whose stage was let go of")
    return found


def _own_linears(module: nn.Module) -> Iterator[nn.Module]:
    every = module.named_parameters(remove_duplicate=False)
    uses = Counter(id(parameter) for _, parameter in every)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | Conv1D) and uses[id(layer.weight)] == 1:
            yield layer


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
