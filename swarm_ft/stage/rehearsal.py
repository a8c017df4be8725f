"""What a stage will hold and need, found out from its own step: rehearsed without memory.

The engine itself trains a step, with torch's fake tensors in the place of all tensors: they have
shapes, types and lives, and neither values nor memory, so nothing is computed. What is alive
meanwhile is counted. So families, adapters, forms, optimizers are no case of their own.
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

from swarm_ft.errors import SwarmError
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import ModelSpec, RunSpec, TaskKind, TrainOptions
from swarm_ft.stage.checkpoint import Checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.stage.forms import Forms
from swarm_ft.stage.held import LiveBytes
from swarm_ft.stage.source import one_line

aten = torch.ops.aten
_log = get_logger(__name__)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a stage takes, in bytes of tensors.

    Attributes:
        held: however many microbatches are: weights, gradients, what the optimizer keeps.
        microbatch: from its forward until its weights' gradients are done.
        computing: beside both, for a task of one microbatch.
        stepping: beside what is held, for the optimizer's step, when there is no microbatch.
    """

    held: int
    microbatch: int
    computing: int
    stepping: int

    def temporaries(self, num_microbatches: int) -> int:
        """Of one task, beside what is held and so many microbatches."""
        return max(self.computing, self.stepping - num_microbatches * self.microbatch)

    def most(self, num_microbatches: int) -> int:
        """At once, with so many microbatches."""
        return self.held + num_microbatches * self.microbatch + self.temporaries(num_microbatches)


def rehearsed(checkpoint: Checkpoint, spec: RunSpec, layers: LayerRange) -> StageMemory | None:
    """What a stage takes that computes in float32 on a CPU, of samples as long as the run's.

    None where a family's code asks for values.

    Raises:
        BadOption: as the stage's own `load`.
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
        except Exception as error:  # noqa: BLE001 - transformers' own code, of any family
            _log.info("stage-not-rehearsed layers=%s: %s", layers, one_line(error))
            return None


def _counted(engine: StageEngine, spec: RunSpec, live: LiveBytes) -> StageMemory:
    """What a loaded engine takes in a microbatch's tasks and in a step, when all else is there."""
    engine.load_state(engine.state())  # all that the optimizer keeps
    engine.begin_step(StepNumber(0), spec.train.micro_batch_size * spec.train.seq_length)
    engine.take_sum(torch.zeros(engine.num_values))  # gradients of others before it
    live.begin()
    _compute(engine, spec)
    computing = live.most
    live.begin()
    engine.squared_grad_norm()
    engine.apply(1.0, 1e-4)
    held, microbatch = engine.state_bytes, engine.microbatch_bytes
    return StageMemory(held, microbatch, computing - held - microbatch, live.most - held)


def _compute(engine: StageEngine, spec: RunSpec) -> None:
    """All of a microbatch."""
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
    """A checkpoint whose tensors have nothing in them; see `Weights`.

    Args:
        checkpoint: whose shapes they have.
        train: what they are to be trained for.
        modes: entered with the first of them, since what has no values cannot be cut.
        live: so too.
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
        forms: Forms,
    ) -> dict[str, Tensor]:
        """See `Checkpoint.load`."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        answers = _Affirming(self._train)
        for mode in (_masks_of_values(), fake, answers, self._live):
            self._modes.enter_context(mode)
        return self._checkpoint.blank(layers, model, tie=tie, forms=forms)


class _Affirming(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whatever is asked of a value without one is so: all are finite, all tokens are targets.

    Of a text that has one class, one token is.
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
        """Torch's own: an operation is called."""
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
        """Where a mask is so, in each of its dimensions; another index is itself."""
        if index is None or index.dtype is not torch.bool:
            return [index]
        return self._places(index)

    def _places(self, mask: Tensor) -> list[Tensor]:
        count = mask.numel()
        if self._train.task_kind is TaskKind.CLASSIFICATION and mask.ndim == 2:
            count = self._train.micro_batch_size
        return [mask.new_empty(count, dtype=torch.int64) for _ in mask.shape]


def _grouped_shape(one: Tensor, other: Tensor, ends: Tensor) -> tuple[int, ...]:
    """Of products of experts, which torch tells of bfloat16 alone."""
    if one.ndim == other.ndim == 2:
        return len(ends), one.shape[0], other.shape[1]
    return one.shape[-2], other.shape[-1]


@contextmanager
def _masks_of_values() -> Iterator[None]:
    """Transformers makes the masks that it makes of tensors with values: most often none."""
    found = masking_utils.is_tracing
    masking_utils.is_tracing = lambda *_: False
    try:
        yield
    finally:
        masking_utils.is_tracing = found
