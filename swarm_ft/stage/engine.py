"""The torch engine that trains the blocks of one stage, step by step.

It knows no peers, codecs or asyncio.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm_ft.base.log import get_logger
from swarm_ft.errors import BadModel, MalformedMessage, NonFinite, OutOfTurn, UnsupportedDtype
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.bounds import MAX_SQUARED_NORM
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import MIN_LENGTH, ModelSpec, RunSpec
from swarm_ft.protocol.spec.sample_rows import NO_LABEL, SECOND
from swarm_ft.protocol.spec.sampling import Sampling
from swarm_ft.protocol.spec.tasks import CausalLm, task_of
from swarm_ft.stage.activation_memory import MicrobatchMemory, Storages
from swarm_ft.stage.adapters import attach, heads_in
from swarm_ft.stage.architecture import SHARED_PART, Architecture, check_seq_length
from swarm_ft.stage.base import Lengths, LossAndCounts, LossAndGradient, OpenStep
from swarm_ft.stage.chunked_loss import Chunks
from swarm_ft.stage.conversion import TORCH_DTYPES
from swarm_ft.stage.device import synchronise
from swarm_ft.stage.finite import is_finite, origin_in
from swarm_ft.stage.heads import FLOAT32_ALONE, counts_by_class
from swarm_ft.stage.kv_cache import TRIAL_PARTS, CacheLayout, StageCache, probe_cache
from swarm_ft.stage.module import DropoutSeeds, StageModule, token_mask
from swarm_ft.stage.routers import balance_loss, check_routers, experts_per_token
from swarm_ft.stage.sampling import choose
from swarm_ft.stage.skeleton import ModelConfig, reports_router
from swarm_ft.stage.weight_formats import WeightFormats, frozen_formats, prepare
from swarm_ft.stage.weight_products import WeightProduct
from swarm_ft.stage.weights import StageWeights

# ---- checks of tensors from other processes


def check_tokens(tokens: Tensor, spec: RunSpec, longest: int | None = None) -> None:
    """Check tokens: int64 [B, T], 1 <= T <= `longest`, each inside of the vocabulary.

    Tokens of a second text have `SECOND` added to their id. A token outside of the embedding table
    raises an exception on a CPU, but breaks the process on a GPU.

    Args:
        tokens: Tokens to check.
        spec: Spec of the run.
        longest: Largest length; None: the run's `seq_length`.

    Raises:
        MalformedMessage: The tokens are invalid.
    """
    longest, vocab_size = longest or spec.train.seq_length, spec.model.vocab_size
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
    """Check labels of an input: int64 [B, T], each `NO_LABEL` or below `num_outputs`.

    Raises:
        MalformedMessage: The labels are invalid.
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


def check_hidden(hidden: Tensor, spec: RunSpec, longest: int | None = None) -> None:
    """Check activations: float32 [B, T, C] with the run's channels, 1 <= T <= `longest`.

    Args:
        hidden: Activations to check.
        spec: Spec of the run.
        longest: Largest length; None: the run's `seq_length`.

    Raises:
        MalformedMessage: The activations are invalid.
    """
    longest, channels = longest or spec.train.seq_length, spec.model.hidden_size
    fits = hidden.ndim == 3 and len(hidden) > 0 and MIN_LENGTH <= hidden.shape[1] <= longest
    if hidden.dtype != torch.float32 or not fits or hidden.shape[2] != channels:
        raise MalformedMessage(
            f"activation: expected float32 [B, T, {channels}] with T from "
            f"{MIN_LENGTH} to {longest}, got {_described(hidden)}"
        )


def check_gradient(gradient: Tensor, output: Tensor) -> None:
    """Check that a gradient is float32 and has its output's shape.

    Raises:
        MalformedMessage: The gradient is invalid.
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
    """A microbatch between forward and backward; the input gets its gradient.

    Attributes:
        x: Input.
        output: Output.
        router_loss: Auxiliary loss of its routers, a scalar; None if there is none.
    """

    x: Tensor
    output: Tensor
    router_loss: Tensor | None = None


CACHE_RTOL, CACHE_BFLOAT16_RTOL = 1e-3, 0.1
"""Relative differences between outputs with and without a cache that rounding may cause."""

_Step = OpenStep[_Graph, list[WeightProduct]]


class WeightSource(Protocol):
    """The part of `Checkpoint` that an engine uses."""

    @property
    def config(self) -> ModelConfig:
        """Config of the model."""

    @property
    def architecture(self) -> Architecture:
        """Names of the model's parts."""

    def load(
        self,
        layers: LayerRange,
        model: ModelSpec,
        *,
        device: torch.device,
        tie: bool,
        forms: WeightFormats,
    ) -> dict[str, Tensor]:
        """Load the tensors of these blocks; see `Checkpoint.load`."""


class StageEngine:
    """The engine of a stage in torch; implements `Engine`."""

    def __init__(
        self,
        checkpoint: WeightSource,
        spec: RunSpec,
        layers: LayerRange,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Create the engine without reading weights.

        Args:
            checkpoint: Checkpoint with the weights.
            spec: Spec of the run; `load` checks its digests.
            layers: Blocks of this stage.
            device: Device of the computation.
            dtype: float32, or bfloat16 for autocast over float32 weights.

        Raises:
            BadOption: The run's samples are too long for the model.
            UnsupportedDtype: The model does not compute in bfloat16.
        """
        check_seq_length(checkpoint.architecture, spec.train.seq_length)
        if dtype is not torch.float32 and spec.model.architecture in FLOAT32_ALONE:
            raise UnsupportedDtype(
                f"--dtype: '{spec.model.architecture}' computes in float32 alone, got {dtype}; "
                f"start this peer with --dtype float32"
            )
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == spec.model.num_blocks
        self.sends_gradients = spec.gradients_cross(layers.start)
        self.has_backward = spec.gradients_cross(layers.stop)
        self._checkpoint = checkpoint
        self._spec = spec
        self._task = task_of(spec.train)
        self._device = device
        self._is_bfloat16 = dtype is torch.bfloat16
        self._autocast = torch.autocast(device.type, torch.bfloat16, self._is_bfloat16)
        self._weights: StageWeights | None = None  # until `load`
        self._memory = MicrobatchMemory()
        self._step: _Step | None = None
        self._cache_layout: CacheLayout | None = None  # until the first text

    @property
    def _num_outputs(self) -> int:
        return self._task.num_outputs(self._spec.model.vocab_size)

    @property
    def state_bytes(self) -> int:
        """Bytes that do not depend on microbatches; see `Engine`."""
        return self.weights.num_bytes

    @property
    def microbatch_bytes(self) -> int:
        """Measured bytes of a full microbatch; see `Engine`."""
        train = self._spec.train
        return self._memory.estimate(train.micro_batch_size * train.seq_length)

    @property
    def weights(self) -> StageWeights:
        """Weights of the stage.

        Raises:
            OutOfTurn: The stage is not loaded.
        """
        if self._weights is None:
            raise OutOfTurn(f"layers {self.layers}: load the stage first")
        return self._weights

    @property
    def open_step(self) -> _Step:
        """The open step.

        Raises:
            OutOfTurn: No step has begun, or it was applied.
        """
        if self._step is None:
            raise OutOfTurn(f"layers {self.layers}: no step has begun")
        return self._step

    def load(self) -> None:
        """Read the weights and create the optimizer; see `Engine`."""
        train = self._spec.train
        check_routers(self._checkpoint.config, train)
        module = self._load_module()
        if train.adapts:
            attach(module, self._spec)
        else:
            module.train_only(self._spec.trained_layers)
        module.train(train.dropout)
        module.recomputes = train.gradient_checkpointing
        shared, copies = self._shared_in(module)
        self._weights = StageWeights(
            module,
            weight_decay=train.weight_decay,
            shared=shared,
            copies=copies,
            optim=train.optim,
            at_once=train.gradient_checkpointing,
        )
        self._log_differences()

    def _load_module(self) -> StageModule:
        """Return the stage's blocks with their weights, frozen ones in the run's formats."""
        module = StageModule(self._checkpoint.config, self.layers, self._task)
        trained_in_full = (*heads_in(module, self._spec), *module.architecture.shared)
        formats = frozen_formats(module, module.architecture.blocks, self._spec, trained_in_full)
        prepare(module, formats)
        tensors = self._checkpoint.load(
            self.layers,
            self._spec.model,
            device=self._device,
            tie=self._spec.keeps_tied,
            forms=formats,
        )
        # Both ends of the model in one stage need no exchange: one parameter has both roles.
        has_both_ends = self.is_first and self.is_last
        tie = self._spec.train.sync_tied_embeddings and has_both_ends
        module.materialise(tensors, self._device, tie=tie)
        return module

    def _log_differences(self) -> None:
        """Log where the run trains the model otherwise than its config requires."""
        train = self._spec.train
        if self.is_last and self._spec.model.tied_embeddings and not self._spec.keeps_tied:
            _log.info(
                "embeddings-untied layers=%s: the model ties its head to its token embeddings; in "
                "this run the head trains on its own (--tied-embeddings sync keeps them tied)",
                self.layers,
            )
        has_router_loss = reports_router(self._checkpoint.config)
        if self.is_last and has_router_loss and not train.router_aux_loss_coef:
            _log.info(
                "router-loss-left-out layers=%s: the config asks for the router's auxiliary loss; "
                "this run trains without it (--router-aux-loss-coef, docs/reference/models.md)",
                self.layers,
            )

    def _shared_in(self, module: StageModule) -> tuple[list[str], list[str]]:
        """Return the names of weights that several stages hold, and those that are copies here."""
        architecture = module.architecture
        names = [name for name, _ in module.named_parameters()]
        shared = [name for name in names if architecture.part_of(name) == SHARED_PART]
        copies = [] if self.is_first else list(shared)
        if self._spec.keeps_tied:
            shared += [architecture.embedding_weight, architecture.head_weight]
            copies += [architecture.head_weight]
        return shared, copies

    def begin_step(self, step: StepNumber, num_targets: int) -> None:
        """Start a step; see `Engine`."""
        begun = _Step(step, num_targets)
        self.weights.zero_grad()
        self._step = begun

    def resume_step(
        self, step: StepNumber, counted: frozenset[MicrobatchIndex], gradient: Tensor | None
    ) -> None:
        """Resume the open step; see `Engine`."""
        self.open_step.resume(step, counted)
        if gradient is not None:
            self.weights.set_flat_gradient(gradient)

    def forward(self, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Compute the stage's output; see `Engine`."""
        step = self.open_step
        graph = self._run(step, microbatch, x, lengths)
        self._check_finite(graph.output, microbatch, "output", x, lengths)
        if self.has_backward:
            step.graphs[microbatch] = graph
        else:
            step.products[microbatch] = []  # as after a backward: only `weight_gradients` follows
        return graph.output.detach()

    def forward_backward(
        self, microbatch: MicrobatchIndex, x: Tensor, labels: Tensor, lengths: Lengths = None
    ) -> LossAndGradient:
        """Compute forward, loss and backward at the last stage; see `Engine`."""
        step = self.open_step
        check_labels(labels, x, self._num_outputs)
        graph = self._run(step, microbatch, x, lengths)
        step.products[microbatch] = []  # set first, so that a failure leaves the step half done
        with self._autocast:
            chunks = self._chunks(graph.output, labels)
            loss, gradient = self._loss_and_gradient(chunks, step.num_targets)
        self._check_finite(loss, microbatch, "loss", x, lengths)
        input_gradient = self._backward(microbatch, graph, chunks.rows, gradient)
        return LossAndGradient(loss_sum=loss.item(), input_gradient=input_gradient)

    def _chunks(self, output: Tensor, labels: Tensor) -> Chunks:
        module = self.weights.module
        return Chunks(*module.select(output, labels.to(self._device)), module.num_outputs)

    def _loss_and_gradient(self, chunks: Chunks, num_targets: int) -> tuple[Tensor, Tensor | None]:
        """Compute the loss and the gradient of the rows that predict targets, chunk by chunk.

        With several chunks the head's weight gradient is complete afterwards. With one it is left
        to `weight_gradients`, like those of other linear weights.
        """
        module = self.weights.module
        if chunks.is_whole:
            return chunks.loss_and_gradient(module.judge, num_targets)
        head = module.get_submodule(module.architecture.head)
        with self.weights.linears.deferring(head):
            return chunks.loss_and_gradient(module.judge, num_targets, self._complete_at_once)

    def _complete_at_once(self) -> None:
        """Compute the weight gradients of one chunk, whose operands are as large as its logits."""
        for product in self.weights.linears.take():
            product.accumulate()

    def infer(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Compute the output for held-out samples; see `Engine`."""
        with self._evaluating() as module:
            output = self._output(module, x, lengths)
        self._check_evaluated(output, "output", x, lengths)
        return output

    def evaluate(self, x: Tensor, labels: Tensor, lengths: Lengths = None) -> LossAndCounts:
        """Compute loss and counts of held-out samples; see `Engine`."""
        check_labels(labels, x, self._num_outputs)
        with self._evaluating() as module:
            output = self._output(module, x, lengths)
            chunks = self._chunks(output, labels)
            is_counted = self._task.num_counts > 0
            loss, predictions = chunks.evaluate(module.judge, is_counted=is_counted)
        self._check_evaluated(loss, "loss", x, lengths)
        counts: tuple[int, ...] = ()
        if is_counted:
            counts = counts_by_class(predictions, chunks.targets_n, self._num_outputs)
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

    def _check_evaluated(self, tensor: Tensor, what: str, x: Tensor, lengths: Lengths) -> None:
        if not is_finite(tensor):
            origin = self._origin(x, lengths)
            raise NonFinite(f"evaluation: {self._not_finite(what)}{origin}")

    def _not_finite(self, what: str) -> str:
        return f"the {what} of layers {self.layers} is inf or NaN"

    def _origin(self, x: Tensor, lengths: Lengths) -> str:
        def forward() -> None:
            with self._evaluating() as module:
                self._output(module, x, lengths)

        module = self.weights.module
        return origin_in(module, module.architecture, forward)

    # ---- generation

    def begin_text(self, max_tokens: int) -> StageText:
        """Begin a text; see `Engine`."""
        if not isinstance(self._task, CausalLm):
            raise BadModel(
                "expected a run of a causal language model; this one trains a classifier"
            )
        positions = self._checkpoint.architecture.positions
        if positions is not None and max_tokens > positions:
            raise MalformedMessage(
                f"a text of {max_tokens} tokens: expected at most {positions}, as many as the "
                "model has positions"
            )
        if self._cache_layout is None:
            self._cache_layout = self._probe_cache()
        return StageText(self, max_tokens, self._cache_layout)

    def _probe_cache(self) -> CacheLayout:
        """Find out, with any input, how this model can read a text in parts with a cache."""
        num_tokens = sum(TRIAL_PARTS)
        x = torch.arange(num_tokens)[None] % self._spec.model.vocab_size
        if not self.is_first:
            random = torch.Generator().manual_seed(0)
            x = torch.randn(1, num_tokens, self._spec.model.hidden_size, generator=random)
        rtol = CACHE_BFLOAT16_RTOL if self._is_bfloat16 else CACHE_RTOL
        return probe_cache(self._checkpoint.config, self.layers, x, self.read, rtol)

    def empty_cache(self) -> StageCache:
        """Return an empty cache for a text."""
        return StageCache(self._checkpoint.config, self.layers)

    def check_input(self, x: Tensor, longest: int) -> None:
        """Check an input of this stage with at most `longest` tokens.

        Raises:
            MalformedMessage: The input is invalid.
        """
        (check_tokens if self.is_first else check_hidden)(x, self._spec, longest)

    def read(self, x: Tensor, cache: StageCache | None) -> Tensor:
        """Return the output [1, T, C], float32 on the CPU, for the tokens after those in the cache.

        Args:
            x: Input of `Text.read`, already checked.
            cache: Cache of the tokens before, to which these are added; None: there are none
                before.

        Raises:
            NonFinite: The output has inf or NaN.
        """
        with self._evaluating() as module:
            output: Tensor = module(x.to(self._device), None, None, cache).float()
        self._check_text(output, "output")
        if cache is not None:
            cache.count_tokens(x.shape[1])
        return output.cpu()

    def last_logits(self, output: Tensor) -> Tensor:
        """Return the last token's logits [V] in float32 of an output [1, T, C]; last stage only.

        Raises:
            NonFinite: A logit is inf or NaN.
        """
        with self._evaluating() as module:
            logits_v = module.logits(output[:, -1:].to(self._device))[0, -1].float()
        self._check_text(logits_v, "next token's logits")
        return logits_v

    def _check_text(self, tensor: Tensor, what: str) -> None:
        if not is_finite(tensor):
            raise NonFinite(f"text: {self._not_finite(what)}")

    def backward(self, microbatch: MicrobatchIndex, gradient: Tensor) -> Tensor | None:
        """Compute the input gradient of a microbatch; see `Engine`."""
        step = self.open_step
        graph = step.graph_of(microbatch)
        check_gradient(gradient, graph.output)
        del step.graphs[microbatch]
        return self._backward(microbatch, graph, graph.output, gradient.to(self._device))

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        """Compute the weight gradients of a microbatch; see `Engine`."""
        # The order is that of the backward pass, since a layer may have been called twice. Each
        # product is freed as soon as it is done.
        products = deque(self.open_step.count(microbatch))
        while products:
            products.popleft().accumulate()
        # Without this wait, the device's queue would delay work that other stages wait for.
        synchronise(self._device)

    def squared_grad_norm(self) -> float:
        """Return the sum of squares of this stage's gradients; see `Engine`."""
        total = self._weights_after_step().squared_grad_norm()
        if not total <= MAX_SQUARED_NORM:  # NaN fails this comparison too
            raise NonFinite(
                f"step {self.open_step.number}: the gradient of layers {self.layers} is inf, NaN "
                f"or too large: its norm is {math.sqrt(total):.3g}{self.weights.origin}"
            )
        return total

    @property
    def num_values(self) -> int:
        """Length of `flat_gradient`; see `Engine`."""
        return self.weights.num_values

    def flat_gradient(self) -> Tensor:
        """Return all gradients of this stage; see `Engine`."""
        return self._weights_after_step().flat_gradient()

    def take_sum(self, total: Tensor) -> None:
        """Replace this stage's gradients by a sum; see `Engine`."""
        self.weights.check_flat(total)
        self.weights.set_flat_gradient(total)

    def shared_gradient(self) -> Tensor:
        """Return the gradients of weights that other stages train too; see `Engine`."""
        return self._weights_after_step().shared_gradient()

    def set_shared_gradient(self, total: Tensor) -> None:
        """Set the sum of these stages' gradients; see `Engine`."""
        self.weights.set_shared_gradient(total)

    def apply(self, clip_factor: float, learning_rate: float) -> None:
        """Scale the gradients, update the weights and end the step; see `Engine`."""
        self.open_step.check_complete()
        try:
            self.weights.apply(clip_factor, learning_rate)
        except (ArithmeticError, ValueError, RuntimeError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            raise NonFinite(
                f"step {self.open_step.number}: {self._spec.train.optim.name.lower()} cannot step "
                f"layers {self.layers} at learning rate {learning_rate:.3g} with weight decay "
                f"{self._spec.train.weight_decay:.3g}: {error}"
            ) from error
        self._step = None

    def apply_sum(
        self, step: StepNumber, total: Tensor, clip_factor: float, learning_rate: float
    ) -> None:
        """Apply a step that other replicas computed; see `Engine`."""
        self.take_sum(total)
        self._step = _Step(step, num_targets=1)
        self.apply(clip_factor, learning_rate)

    def export(self) -> Iterator[bytes]:
        """Yield this stage's weights as a safetensors file; see `Engine`."""
        if self._spec.train.gives_adapter:
            return self.weights.export_adapter()
        return self.weights.export(TORCH_DTYPES[self._spec.result_dtype])

    def state(self) -> dict[str, Tensor]:
        """Return copies of the training state; see `Engine`."""
        return self.weights.state()

    def state_names(self) -> frozenset[str]:
        """Return the names of the tensors of `state`; see `Engine`."""
        return self.weights.state_names()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`; see `Engine`."""
        self.weights.load_state(state)
        self._step = None

    def _run(self, step: _Step, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths) -> _Graph:
        """Compute the forward pass of a microbatch that trains, and measure its memory."""
        step.check_untouched(microbatch)
        (check_tokens if self.is_first else check_hidden)(x, self._spec)
        train = self._spec.train
        seeds = DropoutSeeds(seed=train.seed, step=step.number, microbatch=microbatch)
        x = x.to(self._device).detach().requires_grad_(self.sends_gradients)
        module = self.weights.module
        dropout = seeds if train.dropout else None
        router_loss = None
        with (
            torch.set_grad_enabled(self.has_backward),
            self._memory.measuring(x, but=module) as held,
            self._autocast,
        ):
            if train.router_aux_loss_coef:
                output, logits = module.routed(x, dropout, lengths)
                router_loss = self._router_loss(logits, x, lengths)
            else:
                output = module(x, dropout, lengths)
            output = output.float()
            held.add(output)
        return _Graph(x, output, router_loss)

    def _router_loss(self, logits: Sequence[Tensor], x: Tensor, lengths: Lengths) -> Tensor | None:
        """Return the part of the step's router loss that these blocks have for a microbatch."""
        if not logits:
            return None
        is_token = None if lengths is None else token_mask(x, lengths).flatten()
        num_chosen = experts_per_token(self._checkpoint.config)
        train, num_blocks = self._spec.train, self._spec.model.num_blocks
        part = len(x) / train.batch_size / num_blocks
        return train.router_aux_loss_coef * part * balance_loss(logits, num_chosen, is_token)

    def _backward(
        self, microbatch: MicrobatchIndex, graph: _Graph, root: Tensor, gradient: Tensor | None
    ) -> Tensor | None:
        """Compute all gradients except those of linear weights; return the input gradient.

        Args:
            microbatch: Microbatch of the graph.
            graph: Graph of its forward.
            root: Tensor at which the backward pass begins.
            gradient: Gradient of `root`.
        """
        step, linears = self.open_step, self.weights.linears
        products: list[WeightProduct] = []
        step.products[microbatch] = products  # set first: a failure leaves the step half done
        gradients: dict[Tensor, Tensor | None] = {root: gradient}
        if graph.router_loss is not None:
            gradients[graph.router_loss] = None
        # With adapters the stage's first blocks may have nothing that trains.
        roots = tuple(tensor for tensor in gradients if tensor.requires_grad)
        if roots:
            torch.autograd.backward(roots, tuple(gradients[tensor] for tensor in roots))
        products += linears.take()
        used = (tensor for product in products for tensor in product.tensors)
        self._memory.record(Storages.of(used))
        return self._input_gradient(microbatch, graph.x.grad)

    def _input_gradient(
        self, microbatch: MicrobatchIndex, gradient: Tensor | None
    ) -> Tensor | None:
        if gradient is None:
            return None
        self._check_finite(gradient, microbatch, "input gradient")
        return gradient

    def _check_finite(
        self,
        tensor: Tensor,
        microbatch: MicrobatchIndex,
        what: str,
        x: Tensor | None = None,
        lengths: Lengths = None,
    ) -> None:
        if not is_finite(tensor):
            origin = self._origin(x, lengths) if x is not None else ""
            where = f"step {self.open_step.number}, microbatch {microbatch}"
            raise NonFinite(f"{where}: {self._not_finite(what)}{origin}")

    def _weights_after_step(self) -> StageWeights:
        """Return the weights, with the gradients of all microbatches of the open step."""
        if self._step is not None:
            self._step.check_complete()
        return self.weights


class StageText:
    """A text at a torch engine; implements `Text`.

    Args:
        engine: Engine of the stage.
        max_tokens: Largest number of tokens of the text.
        cache_layout: Size of the stage's caches, and how they are filled.

    Attributes:
        cache: Cache of the text.
    """

    def __init__(self, engine: StageEngine, max_tokens: int, cache_layout: CacheLayout) -> None:
        self._engine = engine
        self._cache_layout = cache_layout
        self.cache = engine.empty_cache()
        self._num_tokens, self._max_tokens = 0, max_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of the text at its full length; see `Text`."""
        return self._cache_layout.num_bytes(self._max_tokens)

    def read(self, x: Tensor) -> Tensor:
        """Compute the output for the next tokens; see `Text`."""
        room = self._max_tokens - self._num_tokens
        if room < 1:
            raise MalformedMessage(f"expected {self._max_tokens} tokens of a text, got another one")
        self._engine.check_input(x, room)
        is_singly = self._cache_layout.one_token_at_a_time and self._num_tokens > 0
        parts = torch.split(x, 1, dim=1) if is_singly else (x,)
        output = torch.cat([self._engine.read(part, self.cache) for part in parts], dim=1)
        self._num_tokens += x.shape[1]
        return output

    def next_token(self, output: Tensor, sampling: Sampling | None) -> int:
        """Choose the token that follows; see `Text`."""
        return choose(self._engine.last_logits(output), sampling, self._num_tokens)
