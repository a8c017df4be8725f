"""Trains the blocks of one stage with torch, step by step. Knows no peers, codecs or asyncio."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from swarm_ft.errors import MalformedMessage, NonFinite, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.protocol.spec.bounds import MAX_SQUARED_NORM
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import ModelSpec, RunSpec
from swarm_ft.protocol.spec.sample_rows import MIN_LENGTH, NO_LABEL, SECOND
from swarm_ft.protocol.spec.tasks import task_of
from swarm_ft.stage.adapters import attach, heads_in
from swarm_ft.stage.architecture import Architecture, check_seq_length
from swarm_ft.stage.base import Lengths, LossAndCounts, LossAndGradient, OpenStep
from swarm_ft.stage.device import synchronise
from swarm_ft.stage.forms import Forms, frozen_forms, prepare
from swarm_ft.stage.heads import counts_by_class
from swarm_ft.stage.held import HeldBytes, Storages
from swarm_ft.stage.module import DropoutSeeds, StageModule, WeightProduct
from swarm_ft.stage.skeleton import ModelConfig, reports_router
from swarm_ft.stage.weights import StageWeights

# ---- checks of tensors that other processes sent


def check_tokens(tokens: Tensor, spec: RunSpec) -> None:
    """Tokens: int64 [B, T], 1 <= T <= the run's `seq_length`, each inside the vocabulary.

    Those of a second text have `SECOND` beside their id.

    A token outside the embeddings' table is an exception on a CPU, but on a GPU it spoils the
    process.

    Raises:
        MalformedMessage: anything else.
    """
    longest, vocab_size = spec.train.seq_length, spec.model.vocab_size
    fits = tokens.ndim == 2 and len(tokens) > 0 and MIN_LENGTH <= tokens.shape[1] <= longest
    if tokens.dtype != torch.int64 or not fits:
        raise MalformedMessage(
            f"tokens: expected int64 [B, T] with T from {MIN_LENGTH} to {longest}, "
            f"got {_described(tokens)}"
        )
    ids = torch.where(tokens // SECOND == 1, tokens - SECOND, tokens)
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise MalformedMessage(f"tokens: expected 0 to {vocab_size - 1}, got {low} to {high}")


def check_labels(labels: Tensor, x: Tensor, num_outputs: int) -> None:
    """Labels of an input [B, T] or [B, T, C]: int64 [B, T], `NO_LABEL` or below `num_outputs`.

    Raises:
        MalformedMessage: anything else.
    """
    if labels.dtype != torch.int64 or labels.shape != x.shape[:2]:
        raise MalformedMessage(
            f"labels: expected int64 {list(x.shape[:2])}, got {_described(labels)}"
        )
    is_right = (labels == NO_LABEL) | ((labels >= 0) & (labels < num_outputs))
    if not bool(is_right.all()):
        first = int(labels[~is_right][0])
        raise MalformedMessage(
            f"labels: expected {NO_LABEL} or 0 to {num_outputs - 1}, got {first}"
        )


def check_hidden(hidden: Tensor, spec: RunSpec) -> None:
    """Activations: float32 [B, T, C] of the run's channels, 1 <= T <= its `seq_length`.

    Raises:
        MalformedMessage: anything else.
    """
    longest, channels = spec.train.seq_length, spec.model.hidden_size
    fits = hidden.ndim == 3 and len(hidden) > 0 and MIN_LENGTH <= hidden.shape[1] <= longest
    if hidden.dtype != torch.float32 or not fits or hidden.shape[2] != channels:
        raise MalformedMessage(
            f"activation: expected float32 [B, T, {channels}] with T from "
            f"{MIN_LENGTH} to {longest}, got {_described(hidden)}"
        )


def check_gradient(gradient: Tensor, output: Tensor) -> None:
    """A gradient has its output's shape, in float32.

    Raises:
        MalformedMessage: it has not.
    """
    if gradient.shape != output.shape or gradient.dtype != torch.float32:
        raise MalformedMessage(
            f"gradient: expected float32 {list(output.shape)}, got {_described(gradient)}"
        )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


# ---- the engine

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A microbatch between its forward and its backward pass; the input gets its gradient."""

    x: Tensor
    output: Tensor


_Step = OpenStep[_Graph, list[WeightProduct]]


class Weights(Protocol):
    """What an engine asks of a checkpoint, see `Checkpoint`."""

    @property
    def config(self) -> ModelConfig:
        """Of the model."""

    @property
    def architecture(self) -> Architecture:
        """Where the model keeps its parts."""

    def load(
        self,
        layers: LayerRange,
        model: ModelSpec,
        *,
        device: torch.device,
        tie: bool,
        forms: Forms,
    ) -> dict[str, Tensor]:
        """These blocks' tensors."""


class StageEngine:
    """See `Engine`, which it is."""

    def __init__(
        self,
        checkpoint: Weights,
        spec: RunSpec,
        layers: LayerRange,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Remember what to load; reads no weights.

        Args:
            checkpoint: where the weights lie.
            spec: the run; `load` checks its digests.
            layers: this stage's blocks.
            device: where the stage computes.
            dtype: float32, or bfloat16 for autocast over float32 weights.

        Raises:
            BadOption: the run's samples are too long for the model.
        """
        check_seq_length(checkpoint.architecture, spec.train.seq_length)
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == spec.model.num_blocks
        self.sends_gradients = spec.gradients_cross(layers.start)
        self.has_backward = spec.gradients_cross(layers.stop)
        self._checkpoint = checkpoint
        self._spec = spec
        self._task = task_of(spec.train)
        self._device = device
        self._autocast = torch.autocast(device.type, torch.bfloat16, dtype is torch.bfloat16)
        self._weights: StageWeights | None = None
        self._held = HeldBytes()
        self._step: _Step | None = None

    @property
    def _num_outputs(self) -> int:
        return self._task.num_outputs(self._spec.model.vocab_size)

    @property
    def exchanges_tied_gradient(self) -> bool:
        """See `Engine`."""
        return self._spec.train.sync_tied_embeddings and self.is_first != self.is_last

    @property
    def state_bytes(self) -> int:
        """See `Engine`."""
        return self.weights.num_bytes

    @property
    def microbatch_bytes(self) -> int:
        """See `Engine`."""
        train = self._spec.train
        return self._held.of(train.micro_batch_size * train.seq_length)

    @property
    def weights(self) -> StageWeights:
        """What the stage trains, as it is now.

        Raises:
            OutOfTurn: it is not loaded.
        """
        if self._weights is None:
            raise OutOfTurn(f"layers {self.layers}: load the stage first")
        return self._weights

    @property
    def open_step(self) -> _Step:
        """How far the stage is with the step that was begun last.

        Raises:
            OutOfTurn: none was, or it was applied.
        """
        if self._step is None:
            raise OutOfTurn(f"layers {self.layers}: no step has begun")
        return self._step

    def load(self) -> None:
        """See `Engine`."""
        train = self._spec.train
        module = StageModule(self._checkpoint.config, self.layers, self._task)
        whole = heads_in(module, self._spec)
        forms = frozen_forms(module, module.architecture.blocks, self._spec, whole)
        prepare(module, forms)
        # Both ends that stay tied may be one tensor here: frozen, or one parameter, see below.
        tensors = self._checkpoint.load(
            self.layers,
            self._spec.model,
            device=self._device,
            tie=self._spec.keeps_tied,
            forms=forms,
        )
        # With both ends in one stage there is nothing to exchange: one parameter has both roles.
        tie = train.sync_tied_embeddings and self.is_first and self.is_last
        module.materialise(tensors, self._device, tie=tie)
        if train.adapts:
            attach(module, self._spec)
        else:
            module.train_only(self._spec.trained_layers)
        module.train(train.dropout)
        module.recomputes = train.gradient_checkpointing
        self._weights = StageWeights(
            module,
            weight_decay=train.weight_decay,
            synchronised=self._spec.keeps_tied,
            optim=train.optim,
            at_once=train.gradient_checkpointing,
        )
        if self.is_last and self._spec.model.tied_embeddings and not self._spec.keeps_tied:
            _log.info(
                "embeddings-untied layers=%s: the model ties its head to its token embeddings; in "
                "this run the head trains on its own (--tied-embeddings sync keeps them tied)",
                self.layers,
            )
        if self.is_last and reports_router(self._checkpoint.config):
            _log.info(
                "router-loss-left-out layers=%s: the config asks for the router's auxiliary loss; "
                "stages train without it (docs/models.md)",
                self.layers,
            )

    def begin_step(self, step: StepNumber, num_targets: int) -> None:
        """See `Engine`."""
        begun = _Step(step, num_targets)
        self.weights.zero_grad()
        self._step = begun

    def resume_step(
        self, step: StepNumber, counted: frozenset[MicrobatchIndex], gradient: Tensor | None
    ) -> None:
        """See `Engine`."""
        self.open_step.resume(step, counted)
        if gradient is not None:
            self.weights.set_flat_gradient(gradient)

    def forward(self, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths = None) -> Tensor:
        """See `Engine`."""
        step = self.open_step
        graph = self._run(step, microbatch, x, lengths)
        self._check_finite(graph.output, microbatch, "output")
        if self.has_backward:
            step.graphs[microbatch] = graph
        else:
            step.left[microbatch] = []
        return graph.output.detach().cpu()

    def forward_backward(
        self, microbatch: MicrobatchIndex, x: Tensor, labels: Tensor, lengths: Lengths = None
    ) -> LossAndGradient:
        """See `Engine`."""
        step = self.open_step
        check_labels(labels, x, self._num_outputs)
        graph = self._run(step, microbatch, x, lengths)
        with self._autocast:
            loss = self.weights.module.loss_sum(graph.output, labels.to(self._device))
        self._check_finite(loss, microbatch, "loss")
        input_gradient = self._backward(microbatch, graph, loss / step.num_targets, None)
        return LossAndGradient(loss_sum=loss.item(), input_gradient=input_gradient)

    def infer(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """See `Engine`."""
        with self._evaluating() as module:
            output = self._output(module, x, lengths)
        self._check_evaluated(output, "output")
        return output.cpu()

    def evaluate(self, x: Tensor, labels: Tensor, lengths: Lengths = None) -> LossAndCounts:
        """See `Engine`."""
        check_labels(labels, x, self._num_outputs)
        with self._evaluating() as module:
            output = self._output(module, x, lengths)
            logits, targets = module.judged(output, labels.to(self._device))
            loss = cross_entropy(logits, targets, reduction="sum")
        self._check_evaluated(loss, "loss")
        counts: tuple[int, ...] = ()
        if self._task.num_counts:
            counts = counts_by_class(logits.argmax(1), targets, self._num_outputs)
        return LossAndCounts(loss_sum=loss.item(), counts=counts)

    @contextmanager
    def _evaluating(self) -> Iterator[StageModule]:
        module = self.weights.module
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad(), self._autocast:
                yield module
        finally:
            module.train(was_training)

    def _output(self, module: StageModule, x: Tensor, lengths: Lengths) -> Tensor:
        (check_tokens if self.is_first else check_hidden)(x, self._spec)
        output: Tensor = module(x.to(self._device), None, lengths).float()
        return output

    def _check_evaluated(self, tensor: Tensor, what: str) -> None:
        if not bool(torch.isfinite(tensor).all()):
            raise NonFinite(f"evaluation: the {what} of layers {self.layers} is inf or NaN")

    def backward(self, microbatch: MicrobatchIndex, gradient: Tensor) -> Tensor | None:
        """See `Engine`."""
        step = self.open_step
        graph = step.graph_of(microbatch)
        check_gradient(gradient, graph.output)
        del step.graphs[microbatch]
        return self._backward(microbatch, graph, graph.output, gradient.to(self._device))

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        """See `Engine`."""
        products = self.open_step.count(microbatch)
        while products:  # each is let go of as soon as it is done
            products.pop().accumulate()
        # Or all that is left would be queued at once, in front of what others wait for.
        synchronise(self._device)

    def squared_grad_norm(self) -> float:
        """See `Engine`."""
        total = self._summed().squared_grad_norm()
        if not total <= MAX_SQUARED_NORM:  # so is NaN
            raise NonFinite(
                f"step {self.open_step.number}: a gradient of layers {self.layers} is inf, NaN or "
                f"as good as that, its norm {math.sqrt(total):.3g}; a smaller --lr may help"
            )
        return total

    @property
    def num_values(self) -> int:
        """See `Engine`."""
        return self.weights.num_values

    def flat_gradient(self) -> Tensor:
        """See `Engine`."""
        return self._summed().flat_gradient()

    def take_sum(self, total: Tensor) -> None:
        """See `Engine`."""
        self.weights.check_flat(total)
        self.weights.set_flat_gradient(total)

    def tied_gradient(self) -> Tensor:
        """See `Engine`."""
        return self._summed().tied_gradient()

    def set_tied_gradient(self, gradient: Tensor) -> None:
        """See `Engine`."""
        self.weights.set_tied_gradient(gradient)

    def apply(self, clip_factor: float, learning_rate: float) -> None:
        """See `Engine`."""
        self.open_step.check_complete()
        self.weights.apply(clip_factor, learning_rate)
        self._step = None

    def apply_sum(
        self, step: StepNumber, total: Tensor, clip_factor: float, learning_rate: float
    ) -> None:
        """See `Engine`."""
        self.take_sum(total)
        self._step = _Step(step, num_targets=1)
        self.apply(clip_factor, learning_rate)

    def export(self) -> bytes:
        """See `Engine`."""
        if self._spec.train.adapts and not self._spec.train.merge:
            return self.weights.export_adapter()
        return self.weights.export()

    def state(self) -> dict[str, Tensor]:
        """See `Engine`."""
        return self.weights.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Engine`."""
        self.weights.load_state(state)
        self._step = None

    def _run(self, step: _Step, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths) -> _Graph:
        step.check_untouched(microbatch)
        (check_tokens if self.is_first else check_hidden)(x, self._spec)
        train = self._spec.train
        seeds = DropoutSeeds(seed=train.seed, step=step.number, microbatch=microbatch)
        x = x.to(self._device).detach().requires_grad_(self.sends_gradients)
        weights = self.weights
        with (
            torch.set_grad_enabled(self.has_backward),
            self._held.measuring(x, but=weights.module) as held,
            self._autocast,
        ):
            output: Tensor = weights.module(x, seeds if train.dropout else None, lengths).float()
            held.add(output)
        return _Graph(x, output)

    def _backward(
        self, microbatch: MicrobatchIndex, graph: _Graph, root: Tensor, gradient: Tensor | None
    ) -> Tensor | None:
        """All gradients but those of linear layers' weights; the input's is returned."""
        step, linears = self.open_step, self.weights.linears
        left = step.left[microbatch] = []  # first: should it fail, nobody resumes the step
        if root.requires_grad:  # adapters may be in other blocks than the stage's first
            torch.autograd.backward(root, gradient)
        left += linears.take()
        self._held.saw(Storages.of(tensor for product in left for tensor in product.tensors))
        return self._input_gradient(microbatch, graph.x.grad)

    def _input_gradient(
        self, microbatch: MicrobatchIndex, gradient: Tensor | None
    ) -> Tensor | None:
        if gradient is None:
            return None
        self._check_finite(gradient, microbatch, "input gradient")
        return gradient.cpu()

    def _check_finite(self, tensor: Tensor, microbatch: MicrobatchIndex, what: str) -> None:
        if not bool(torch.isfinite(tensor).all()):
            raise NonFinite(
                f"step {self.open_step.number}, microbatch {microbatch}: the {what} of layers "
                f"{self.layers} is inf or NaN; a smaller --lr may help"
            )

    def _summed(self) -> StageWeights:
        if self._step is not None:
            self._step.check_complete()
        return self.weights
