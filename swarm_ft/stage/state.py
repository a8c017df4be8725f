"""All that a stage's training goes on from: weights and AdamW's moments, by name.

One flat table of CPU tensors: a weight under its own name, and for each weight
`adamw/exp_avg/NAME`, `adamw/exp_avg_sq/NAME` and `adamw/step/NAME` (a float32 number, as torch
keeps it). A weight that was never stepped has zeros there, which is what AdamW begins with, so
stages that went on from equal states have equal tables. Learning rates come with each commit and
random numbers from (seed, step, microbatch, block), so neither is part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from swarm_ft.errors import BadSnapshot
from swarm_ft.protocol.digest import digest_of
from swarm_ft.protocol.run_spec import MAX_STEPS
from swarm_ft.stage.tensor_files import tensor_digest

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
STEP = "step"
_MAX_NAMES_TOLD = 3


def take_state(module: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Copies on the CPU of all weights and moments; a shared weight is there once."""
    state: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        state[name] = _copy(parameter)
        held = optimizer.state.get(parameter) or _unstepped(parameter)
        for kind in (EXP_AVG, EXP_AVG_SQ, STEP):
            state[_key(kind, name)] = _copy(held[kind])
    return state


def put_state(module: nn.Module, optimizer: torch.optim.AdamW, state: Mapping[str, Tensor]) -> None:
    """Go on from `state`, all of it or, if it is refused, none.

    Raises:
        BadSnapshot: a tensor is missing, unknown, of another shape or dtype, not finite, or
            nothing that AdamW could have come to.
    """
    parameters = dict(module.named_parameters())
    _check(parameters, state)
    for name, parameter in parameters.items():
        parameter.detach().copy_(state[name])
        optimizer.state[parameter] = {
            # torch keeps the count of steps on the CPU, and adds to it in place.
            STEP: _copy(state[_key(STEP, name)]),
            **{
                moment: state[_key(moment, name)].to(parameter.device, copy=True)
                for moment in (EXP_AVG, EXP_AVG_SQ)
            },
        }


def state_digest(state: Mapping[str, Tensor]) -> bytes:
    """One digest of all names, shapes, dtypes and bytes: equal states, equal digest.

    Tensors are digested side by side, as fast as the memory is read.
    """
    names = sorted(state)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(tensor_digest, [state[name] for name in names])
        pairs = zip(names, digests, strict=True)
        return digest_of(*(part for name, digest in pairs for part in (name.encode(), digest)))


def _key(kind: str, name: str) -> str:
    return f"adamw/{kind}/{name}"


def _unstepped(parameter: nn.Parameter) -> dict[str, Tensor]:
    shapes = {EXP_AVG: parameter.shape, EXP_AVG_SQ: parameter.shape, STEP: ()}
    return {kind: torch.zeros(shape) for kind, shape in shapes.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _check(parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]) -> None:
    shapes = dict(_shapes(parameters))
    _check_names(set(shapes), set(state))
    for name, shape in shapes.items():
        tensor = state[name]
        if tensor.dtype != torch.float32 or tensor.shape != shape:
            raise BadSnapshot(
                f"state: expected {name} as float32 {list(shape)}, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
    for name in parameters:
        _check_values(name, state)


def _shapes(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Size]]:
    for name, parameter in parameters.items():
        yield name, parameter.shape
        yield _key(EXP_AVG, name), parameter.shape
        yield _key(EXP_AVG_SQ, name), parameter.shape
        yield _key(STEP, name), torch.Size()


def _check_names(expected: set[str], got: set[str]) -> None:
    missing, unknown = sorted(expected - got), sorted(got - expected)
    if missing or unknown:
        raise BadSnapshot(
            f"state: expected {len(expected)} tensors of this stage; it lacks "
            f"{_some(missing)}, and has beside them {_some(unknown)}"
        )


def _check_values(name: str, state: Mapping[str, Tensor]) -> None:
    for key in (name, _key(EXP_AVG, name), _key(EXP_AVG_SQ, name)):
        if not bool(torch.isfinite(state[key]).all()):
            raise BadSnapshot(f"state: {key} is inf or NaN somewhere; take it from another donor")
    # AdamW takes the root of it: a negative one would be NaN weights at the next step.
    if bool((state[_key(EXP_AVG_SQ, name)] < 0).any()):
        raise BadSnapshot(f"state: {_key(EXP_AVG_SQ, name)} is negative somewhere")
    steps = float(state[_key(STEP, name)])
    if not (0 <= steps <= MAX_STEPS and steps.is_integer()):
        raise BadSnapshot(
            f"state: expected {_key(STEP, name)} as a whole number of 0 to {MAX_STEPS}, got {steps}"
        )


def _some(names: list[str]) -> str:
    told = ", ".join(name[:100] for name in names[:_MAX_NAMES_TOLD]) or "none"
    more = len(names) - _MAX_NAMES_TOLD
    return f"{told} and {more} more" if more > 0 else told
