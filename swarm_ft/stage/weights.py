"""Weights, gradients and optimizer of one stage. Tensors are exchanged on the CPU.

Everything except the export concerns the parameters that train, see `StageModule.trainable`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor, nn

from swarm_ft.errors import BadSnapshot, MalformedMessage
from swarm_ft.protocol.spec.run_spec import MAX_STEPS, Optim
from swarm_ft.stage.activation_memory import Storages
from swarm_ft.stage.adapters import adapter_weights, merged_weights
from swarm_ft.stage.conversion import cast_for_storage, to_published
from swarm_ft.stage.device import summable
from swarm_ft.stage.finite import origin_among
from swarm_ft.stage.module import StageModule
from swarm_ft.stage.optimizers import NEVER_NEGATIVE, STEP, OptimizerKind, StateTensor, kind_of
from swarm_ft.stage.tensor_files import file_pieces
from swarm_ft.stage.weight_formats import SCALES, Lazy
from swarm_ft.stage.weight_products import DeferredLinears

T = TypeVar("T")
_NORMED_VALUES = 1 << 20


class StageWeights:
    """A stage's module with its optimizer.

    Attributes:
        module: Module of the stage.
        linears: Layers of the module whose weight gradients are deferred.
    """

    def __init__(
        self,
        module: StageModule,
        *,
        weight_decay: float,
        shared: Collection[str] = (),
        copies: Collection[str] = (),
        optim: Optim = Optim.ADAMW,
        at_once: bool = False,
    ) -> None:
        """Create the optimizer of a module with its weights.

        Args:
            module: Module on the stage's device.
            weight_decay: Weight decay, on all weights except biases and norms.
            shared: Names of weights that several stages hold, including those that this stage
                lacks.
            copies: Names of shared weights that count, or are exported, elsewhere or by another
                name.
            optim: Optimizer.
            at_once: Whether a backward computes the linear layers' weight gradients too.
        """
        self.module = module
        self.linears = DeferredLinears(module, at_once=at_once)
        self._shared = sorted(shared)
        self._copies = frozenset(copies)
        self._kind = kind_of(optim)
        # The list is cached, because a walk through the module takes longer than a small model's
        # step.
        self._trained = module.trainable()
        self._optimizer = self._kind.create(self._trained.values(), weight_decay)

    @property
    def num_values(self) -> int:
        """Number of values of the whole gradient; 1 if nothing trains."""
        return max(1, sum(parameter.numel() for parameter in self._by_name()))

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state, and of the weights' copies."""
        return self._lasting_bytes + self.linears.cast_bytes

    @cached_property
    def _lasting_bytes(self) -> int:
        gradients = sum(parameter.nbytes for parameter in self._by_name())
        kept = self._kind.state_bytes(self._by_name())
        return Storages.of(self._tensors()).num_bytes + gradients + kept

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.module.parameters()
        yield from (one for name, one in self.module.named_buffers() if name.endswith(SCALES))

    def zero_grad(self) -> None:
        """Drop all gradients, including the deferred ones."""
        self._optimizer.zero_grad(set_to_none=True)
        self.linears.forget()

    def squared_grad_norm(self) -> float:
        """Return the sum of squares of the gradients in float64; shared weights count once."""
        own = self._without_copies(self._trained)
        norms = [
            torch.linalg.vector_norm(piece, dtype=torch.float64)
            for parameter in own.values()
            if parameter.grad is not None
            # The norm is computed in pieces, because a CPU copies its input to float64.
            for piece in torch.split(summable(parameter.grad).reshape(-1), _NORMED_VALUES)
        ]
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    @property
    def origin(self) -> str:
        """Text about the first gradient that is not finite, see `finite.origin_among`."""
        gradients = {name: parameter.grad for name, parameter in self._trained.items()}
        return origin_among(gradients, self.module.architecture)

    def flat_gradient(self) -> Tensor:
        """Return all gradients, float32 [n], in the order of the parameters' names.

        Zeros for missing ones.
        """
        parameters = self._by_name()
        return _flat(parameters) if parameters else torch.zeros(1)

    def check_flat(self, values: Tensor) -> None:
        """Check that a tensor has one value for each of this stage's parameters.

        Raises:
            MalformedMessage: The tensor has another length or dtype.
        """
        _check_flat(values, self.num_values, "stage")

    def set_flat_gradient(self, gradient: Tensor) -> None:
        """Replace the gradients by values [n] that `check_flat` has checked."""
        _set_flat(self._by_name(), gradient)

    def shared_gradient(self) -> Tensor:
        """Return the gradients [n] of weights that other stages train too.

        Zeros for missing ones.
        """
        return _flat(self._shared_weights())

    def set_shared_gradient(self, total: Tensor) -> None:
        """Set the sum [n] of all these stages' gradients.

        Raises:
            MalformedMessage: The sum has another length or dtype.
        """
        weights = self._shared_weights()
        _check_flat(total, sum(weight.numel() for weight in weights), "shared weights")
        _set_flat(weights, total)

    def apply(self, clip_factor: float, learning_rate: float) -> None:
        """Scale the gradients, update the weights and drop the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            for parameter in group["params"]:
                if clip_factor != 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(clip_factor)
        self._optimizer.step()
        self.zero_grad()

    def export(self, dtype: torch.dtype) -> Iterator[bytes]:
        """Yield a shard of weights in a dtype, with Hugging Face's names and merged adapters.

        Weights that several stages hold are in the first stage's shard alone. Tensors that are not
        stored in their exported form are created one block after the other.
        """
        own = self._without_copies(merged_weights(self.module))
        part_of = self.module.architecture.part_of
        # A rule may join several tensors to one published tensor, all of the same block.
        parts = [dict(part) for _, part in groupby(own.items(), lambda item: part_of(item[0]))]
        outlines = self._published(parts, Lazy.outline, dtype)
        return file_pieces(
            dict(outlines), (one for _, one in self._published(parts, Lazy.made, dtype))
        )

    def _published(
        self,
        parts: Iterable[dict[str, Lazy]],
        form: Callable[[Lazy], Tensor],
        dtype: torch.dtype,
    ) -> Iterator[tuple[str, Tensor]]:
        model = self.module.causal_model
        for part in parts:
            tensors = to_published(model, {name: form(one) for name, one in part.items()})
            for name in tuple(tensors):
                yield name, cast_for_storage(model, name, tensors.pop(name), dtype)

    def export_adapter(self) -> Iterator[bytes]:
        """Yield the stage's adapters alone, with peft's names."""
        weights = adapter_weights(self.module)
        return file_pieces(weights, weights.values())

    def state(self) -> dict[str, Tensor]:
        """Return copies on the CPU of weights that train and of their optimizer state.

        A weight with two names appears once.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self._trained.items():
            state[name] = _copy(parameter)
            own_state = self._optimizer.state.get(parameter) or {}
            for part, kept in self._kind.state_of(parameter.shape).items():
                copy = _copy(own_state[part]) if part in own_state else kept.initial()
                state[_key(self._kind, part, name)] = copy
        return state

    def state_names(self) -> frozenset[str]:
        """Return the names of the tensors of `state`."""
        return frozenset(dict(_expected(self._kind, self._trained)))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, without gradients; a refused state changes nothing.

        Raises:
            BadSnapshot: A tensor is missing or unknown, has another shape or dtype, is not finite,
                or cannot be state of the optimizer.
        """
        parameters = self._trained
        _check(self._kind, parameters, state)
        for name, parameter in parameters.items():
            parameter.detach().copy_(state[name])
            self._optimizer.state[parameter] = {
                # torch keeps the count of steps on the CPU, and modifies it in place.
                part: state[_key(self._kind, part, name)].to(
                    "cpu" if part == STEP else parameter.device, copy=True
                )
                for part in self._kind.state_of(parameter.shape)
            }
        self.zero_grad()

    def _by_name(self) -> list[nn.Parameter]:
        return [self._trained[name] for name in sorted(self._trained)]

    def _shared_weights(self) -> list[nn.Parameter]:
        return [self._trained[name] for name in self._shared if name in self._trained]

    def _without_copies(self, own: dict[str, T]) -> dict[str, T]:
        return {name: one for name, one in own.items() if name not in self._copies}


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    """Return the gradients on the CPU, float32 [n], one after the other; zeros for missing ones."""
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for part, parameter in zip(_parts(flat, parameters), parameters, strict=True):
        if parameter.grad is not None:
            part.copy_(parameter.grad)
    return flat


def _set_flat(parameters: list[nn.Parameter], gradient: Tensor) -> None:
    """Set copies of values [n] as gradients; `apply` scales them."""
    for part, parameter in zip(_parts(gradient, parameters), parameters, strict=True):
        parameter.grad = part.to(parameter.device, copy=True)


def _check_flat(values: Tensor, num_values: int, whose: str) -> None:
    if values.shape != (num_values,) or values.dtype != torch.float32:
        raise MalformedMessage(
            f"{whose}: expected a float32 gradient [{num_values}], "
            f"got {values.dtype} {list(values.shape)}"
        )


def _parts(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return views of `flat` in the parameters' shapes."""
    pieces = torch.split(flat, [p.numel() for p in parameters]) if parameters else ()
    return [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]


# ---- all that a stage's training goes on from: what trains and what its optimizer keeps, by name
#
# The state is a flat table of CPU tensors: a weight under its own name, and its optimizer state
# under `OPTIMIZER/PART/NAME`. AdamW has `adamw/exp_avg/NAME`, `adamw/exp_avg_sq/NAME` and
# `adamw/step/NAME` (a float32 number, as in torch). A weight that was never updated has zeros, the
# initial values of optimizers, so that stages with equal histories have equal tables. Learning
# rates arrive with each commit and random numbers follow from (seed, step, microbatch, block), so
# that neither is part of the state. Nor are frozen weights, which every peer reads from the run's
# checkpoint.

_MAX_NAMES_SHOWN = 3


def _key(kind: OptimizerKind, part: str, name: str) -> str:
    return f"{kind.name}/{part}/{name}"


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _check(
    kind: OptimizerKind, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    expected = dict(_expected(kind, parameters))
    _check_names(set(expected), set(state))
    for name, (shape, dtype) in expected.items():
        tensor = state[name]
        if tensor.dtype != dtype or tensor.shape != shape:
            raise BadSnapshot(
                f"state: expected {name} as {dtype} {list(shape)}, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
    for name, parameter in parameters.items():
        _check_finite(name, state[name])
        for part in kind.state_of(parameter.shape):
            _check_state_part(part, _key(kind, part, name), state)


def _expected(
    kind: OptimizerKind, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, StateTensor]]:
    for name, parameter in parameters.items():
        yield name, StateTensor(parameter.shape)
        for part, kept in kind.state_of(parameter.shape).items():
            yield _key(kind, part, name), kept


def _check_names(expected: set[str], got: set[str]) -> None:
    missing, unknown = sorted(expected - got), sorted(got - expected)
    if missing or unknown:
        raise BadSnapshot(
            f"state: expected {len(expected)} tensors of this stage; missing: "
            f"{_some(missing)}, unknown: {_some(unknown)}"
        )


def _check_finite(key: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise BadSnapshot(f"state: {key} is inf or NaN somewhere; take it from another source")


def _check_state_part(part: str, key: str, state: Mapping[str, Tensor]) -> None:
    if part == STEP:
        steps = float(state[key])
        if not (0 <= steps <= MAX_STEPS and steps.is_integer()):
            raise BadSnapshot(
                f"state: expected {key} as a whole number of 0 to {MAX_STEPS}, got {steps}"
            )
        return
    _check_finite(key, state[key])
    # Optimizers take its root: a negative value would become NaN weights at the next step.
    if part in NEVER_NEGATIVE and not bool((state[key] >= 0).all()):
        raise BadSnapshot(f"state: {key} is negative somewhere")


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:100] for name in names[:_MAX_NAMES_SHOWN]) or "none"
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
