"""Weights, gradients and AdamW of one stage. Knows no microbatch, no step, no loss.

Tensors come and go on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from swarm_ft.errors import MalformedMessage
from swarm_ft.protocol.digest import digest_of
from swarm_ft.stage.architecture import HEAD_WEIGHT
from swarm_ft.stage.deferred import DeferredLinears
from swarm_ft.stage.module import StageModule
from swarm_ft.stage.momentum import BETA1, BETA2
from swarm_ft.stage.state import EXP_AVG, put_state, take_state
from swarm_ft.stage.tensor_files import tensor_digest

COPIES = 4
"""Weights, gradients and AdamW's two moments, each as large as the weights."""


class StageWeights:
    """A stage's module with its optimizer.

    Attributes:
        linears: those layers of the module whose weights get their gradients later.
    """

    def __init__(self, module: StageModule, *, weight_decay: float, synchronised: bool) -> None:
        """Take a module that has its weights.

        Args:
            module: on the stage's device.
            weight_decay: AdamW's, on all but biases and norms.
            synchronised: embeddings and head are one tensor, held at both ends of the pipeline;
                all that is counted or written once is so at the first stage.
        """
        self.module = module
        self.linears = DeferredLinears(module)
        self._synchronised = synchronised
        self._optimizer = _adamw(module, weight_decay)

    @property
    def num_values(self) -> int:
        """Of the whole gradient."""
        return sum(parameter.numel() for parameter in self._by_name())

    @property
    def num_bytes(self) -> int:
        """Of weights, gradients and moments, and of what is made of weights to compute with."""
        own = sum(parameter.nbytes for parameter in self._by_name())
        return COPIES * own + self.linears.cast_bytes

    def zero_grad(self) -> None:
        """Drop all gradients, those that were yet to be computed too."""
        self._optimizer.zero_grad(set_to_none=True)
        self.linears.forget()

    def squared_grad_norm(self) -> float:
        """Sum of squares of the gradients, accumulated in float64; the tied tensor counts once."""
        own = dict(self.module.named_parameters())
        if self._synchronised and not self.module.is_first:
            own.pop(HEAD_WEIGHT, None)
        norms = [
            torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
            for parameter in own.values()
            if parameter.grad is not None
        ]
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def flat_gradient(self) -> Tensor:
        """All gradients, float32 [n], parameters in the order of their names; zeros for none."""
        parameters = self._by_name()
        return _flat(parameters, [p.grad for p in parameters])

    def flat_momentum(self) -> Tensor:
        """AdamW's first moments in the same order, float32 [n]; zeros before the first step."""
        parameters, state = self._by_name(), self._optimizer.state
        return _flat(parameters, [state[p][EXP_AVG] if p in state else None for p in parameters])

    def check_flat(self, values: Tensor) -> None:
        """Whether there is one value for each of this stage's parameters.

        Raises:
            MalformedMessage: of another length or dtype.
        """
        if values.shape != (self.num_values,) or values.dtype != torch.float32:
            raise MalformedMessage(
                f"stage: expected a float32 gradient [{self.num_values}], "
                f"got {values.dtype} {list(values.shape)}"
            )

    def set_flat_gradient(self, gradient: Tensor) -> None:
        """Take gradients [n], of `check_flat`, in the place of the present ones."""
        parameters = self._by_name()
        for part, parameter in zip(_parts(gradient, parameters), parameters, strict=True):
            parameter.grad = part.to(parameter.device, copy=True)

    def tied_gradient(self) -> Tensor:
        """Gradient [V, C] of this end's tied tensor, zeros if it has none; not to be written to."""
        weight = self._tied_weight()
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        return gradient.detach().cpu()

    def set_tied_gradient(self, gradient: Tensor) -> None:
        """Take the sum of both ends' gradients [V, C].

        Raises:
            MalformedMessage: of another shape or dtype.
        """
        weight = self._tied_weight()
        if gradient.shape != weight.shape or gradient.dtype != torch.float32:
            raise MalformedMessage(
                f"tied embeddings: expected a float32 gradient {list(weight.shape)}, "
                f"got {gradient.dtype} {list(gradient.shape)}"
            )
        # A copy: in one process both ends may be given the same tensor, and `apply` scales it.
        weight.grad = gradient.to(weight.device, copy=True)

    def apply(self, clip_factor: float, learning_rate: float) -> None:
        """Scale the gradients, step AdamW and drop the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            for parameter in group["params"]:
                if clip_factor != 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(clip_factor)
        self._optimizer.step()
        self.zero_grad()

    def export(self, path: Path) -> int:
        """Write a shard of float32 weights under Hugging Face's names and rename it into place.

        Synchronised embeddings are in the first stage's shard alone.

        Returns:
            The file's size in bytes.
        """
        weights = dict(self.module.state_dict())
        if self._synchronised:
            weights.pop(HEAD_WEIGHT, None)
        partial = path.with_name(path.name + ".partial")
        save_file(weights, partial, metadata={"format": "pt"})
        os.replace(partial, path)
        return path.stat().st_size

    def state(self) -> dict[str, Tensor]:
        """Copies of weights and moments, see `stage.state`."""
        return take_state(self.module, self._optimizer)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`, without gradients.

        Raises:
            BadSnapshot: it is not a state of this stage; nothing was changed.
        """
        put_state(self.module, self._optimizer, state)
        self.zero_grad()

    def digest(self) -> bytes:
        """Digest of all weights, by name: equal weights, equal digest."""
        weights = self.module.state_dict()
        pieces = ((name.encode(), tensor_digest(weights[name])) for name in sorted(weights))
        return digest_of(*(piece for pair in pieces for piece in pair))

    def _by_name(self) -> list[nn.Parameter]:
        own = dict(self.module.named_parameters())
        return [own[name] for name in sorted(own)]

    def _tied_weight(self) -> nn.Parameter:
        return self.module.embedding_weight if self.module.is_first else self.module.head_weight


def _flat(parameters: list[nn.Parameter], tensors: list[Tensor | None]) -> Tensor:
    """A tensor of each parameter's shape, or none for zeros, one after the other on the CPU."""
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for part, tensor in zip(_parts(flat, parameters), tensors, strict=True):
        if tensor is not None:
            part.copy_(tensor)
    return flat


def _parts(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Views of `flat`, one of each parameter's shape."""
    pieces = torch.split(flat, [p.numel() for p in parameters])
    return [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]


def _adamw(module: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW whose decay spares biases and norms: in these models, all that has one dimension."""
    decayed = [p for p in module.parameters() if p.ndim > 1]
    spared = [p for p in module.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(BETA1, BETA2), eps=1e-8)
