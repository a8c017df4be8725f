"""Memory of a stage, found by a rehearsal of its own step without memory.

The engine itself trains a step with torch's fake tensors, which have shapes, types and lifetimes,
but neither values nor memory, so that nothing is computed. The rehearsal counts the live tensors.
Families, adapters, forms and optimizers therefore need no special cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from swarm_ft.base.log import get_logger
from swarm_ft.errors import SwarmError
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import ModelSpec, RunSpec, TaskKind, TrainOptions
from swarm_ft.stage.activation_memory import LiveBytes
from swarm_ft.stage.checkpoint import Checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.stage.source import one_line
from swarm_ft.stage.weight_formats import WeightFormats

aten = torch.ops.aten
_log = get_logger(__name__)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of a stage in bytes of tensors.

    Attributes:
        held: Bytes that do not depend on microbatches: weights, gradients, optimizer state.
        microbatch: Bytes of a microbatch from its forward until its weight gradients.
        computing: Bytes beside both, for a task of one microbatch.
        stepping: Bytes beside `held` for the optimizer's step, without microbatches.
    """

    held: int
    microbatch: int
    computing: int
    stepping: int

    def temporaries(self, num_microbatches: int) -> int:
        """Return the temporary bytes of a task, beside `held` and this number of microbatches."""
        return max(self.computing, self.stepping - num_microbatches * self.microbatch)

    def most(self, num_microbatches: int) -> int:
        """Return the most bytes at one time with this number of microbatches."""
        return self.held + num_microbatches * self.microbatch + self.temporaries(num_microbatches)


def rehearse_stage(checkpoint: Checkpoint, spec: RunSpec, layers: LayerRange) -> StageMemory | None:
    """Return the memory of a stage in float32 on a CPU, for samples of the run's length.

    Returns:
        The memory; None if the family's code needs values.

    Raises:
        BadOption: The stage's `load` refuses the run.
    """
    live = LiveBytes()
    with ExitStack() as modes:
        blank = _Blank(checkpoint, spec.train, modes, live)
        engine = StageEngine(blank, spec, layers, device=CPU, dtype=torch.float32)
        try:
            engine.load()
            return _counted(engine, spec, live)
        except SwarmError:
            raise
        except Exception as error:  # noqa: BLE001 - a family's own code may raise anything
            _log.info("stage-not-rehearsed layers=%s: %s", layers, one_line(error))
            return None


def _counted(engine: StageEngine, spec: RunSpec, live: LiveBytes) -> StageMemory:
    """Return the memory of a loaded engine in a microbatch's tasks and in a step."""
    engine.load_state(engine.state())  # creates the optimizer state
    engine.begin_step(StepNumber(0), spec.train.micro_batch_size * spec.train.seq_length)
    engine.take_sum(torch.zeros(engine.num_values))  # creates gradients of earlier microbatches
    live.begin()
    _compute(engine, spec)
    computing = live.most
    live.begin()
    engine.squared_grad_norm()
    engine.apply(1.0, 1e-4)
    held, microbatch = engine.state_bytes, engine.microbatch_bytes
    return StageMemory(held, microbatch, computing - held - microbatch, live.most - held)


def _compute(engine: StageEngine, spec: RunSpec) -> None:
    """Compute one microbatch in full."""
    tokens_bt = torch.zeros(spec.train.micro_batch_size, spec.train.seq_length, dtype=torch.int64)
    x = tokens_bt if engine.is_first else torch.zeros(*tokens_bt.shape, spec.model.hidden_size)
    if engine.is_last and engine.has_backward:
        engine.forward_backward(MicrobatchIndex(0), x, tokens_bt)
    else:
        output = engine.forward(MicrobatchIndex(0), x)
        if engine.has_backward:
            engine.backward(MicrobatchIndex(0), torch.ones_like(output))
            del output
    engine.weight_gradients(MicrobatchIndex(0))


class _Blank:
    """A checkpoint whose tensors have no values; see `Weights`.

    Args:
        checkpoint: Checkpoint with the shapes.
        train: Training options of the run.
        modes: Stack that the modes enter with the first tensors, since tensors without values
            cannot be cut.
        live: Counter of live tensors, which enters with the modes.
    """

    def __init__(
        self, checkpoint: Checkpoint, train: TrainOptions, modes: ExitStack, live: LiveBytes
    ) -> None:
        self.config, self.architecture = checkpoint.config, checkpoint.architecture
        self._checkpoint, self._modes, self._live = checkpoint, modes, live
        self._train = train

    def load(
        self,
        layers: LayerRange,
        model: ModelSpec,
        *,
        device: torch.device,
        tie: bool,
        forms: WeightFormats,
    ) -> dict[str, Tensor]:
        """Return tensors without values; see `Checkpoint.load`."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        answers = _AssumeTrue(self._train)
        for mode in (_masks_of_values(), fake, answers, self._live):
            self._modes.enter_context(mode)
        return self._checkpoint.blank(layers, model, tie=tie, forms=forms)


class _AssumeTrue(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions about missing values: all are finite, all tokens are targets.

    In a text with one class, one token is the target.
    """

    def __init__(self, train: TrainOptions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._train = train

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run an operation, with answers in place of missing values; torch calls this."""
        if func is aten._local_scalar_dense.default:  # noqa: SLF001
            return True if args[0].dtype is torch.bool else 1
        if func is aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in self._indices(index)]
        if func is aten.nonzero.default:
            return torch.stack(self._places(args[0]), 1)
        if func is aten._grouped_mm.default:  # noqa: SLF001
            return args[0].new_empty(_grouped_shape(*args[:3]))
        return func(*args, **(kwargs or {}))

    def _indices(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """Return the indices of a mask in each of its dimensions; another index is unchanged."""
        if index is None or index.dtype is not torch.bool:
            return [index]
        return self._places(index)

    def _places(self, mask: Tensor) -> list[Tensor]:
        count = mask.numel()
        if self._train.task_kind is TaskKind.CLASSIFICATION and mask.ndim == 2:
            count = self._train.micro_batch_size
        return [mask.new_empty(count, dtype=torch.int64) for _ in mask.shape]


def _grouped_shape(one: Tensor, other: Tensor, ends: Tensor) -> tuple[int, ...]:
    """Return the shape of products of experts, for which torch has a rule in bfloat16 alone."""
    if one.ndim == other.ndim == 2:
        return len(ends), one.shape[0], other.shape[1]
    return one.shape[-2], other.shape[-1]


@contextmanager
def _masks_of_values() -> Iterator[None]:
    """Create masks as for tensors with values, which mostly means none."""
    found = masking_utils.is_tracing
    masking_utils.is_tracing = lambda *_: False
    try:
        yield
    finally:
        masking_utils.is_tracing = found
