"""The interface of engines that train a stage.

Shapes: B samples, T tokens, C channels, V vocabulary. All calls are synchronous and come from one
compute thread, except properties, which any thread may read. Input and output tensors are on the
CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from swarm_ft.errors import MalformedMessage, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.sampling import Sampling

Lengths = Sequence[int | tuple[int, ...]] | None
"""Tokens of each sample of a microbatch, or of each document of a packed sample.

None means that every sample is one document in the full length of the tensor.
"""


def is_packed(lengths: Lengths) -> bool:
    """Whether a sample contains several documents."""
    return any(isinstance(one, tuple) for one in lengths or ())


def tokens_of(lengths: Sequence[int | tuple[int, ...]]) -> list[int]:
    """Return the tokens of each sample [B]."""
    return [sum(one) if isinstance(one, tuple) else one for one in lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossAndGradient:
    """Result of a microbatch at the last stage.

    Attributes:
        loss_sum: Cross-entropy in nats, summed over the microbatch's targets.
        input_gradient: Gradient of the step's mean loss, float32 [B, T, C]; None if not needed.
    """

    loss_sum: float
    input_gradient: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossAndCounts:
    """Result of a held-out microbatch at the last stage.

    Attributes:
        loss_sum: Cross-entropy in nats, summed over the microbatch's targets.
        counts: Counts of the targets for the task's metrics, see `Task.num_counts`.
    """

    loss_sum: float
    counts: tuple[int, ...] = ()


class Text(Protocol):
    """A text that a client continues at a stage, with the stage's cache of it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the text at its full length."""

    def read(self, x: Tensor) -> Tensor:
        """Compute the stage's output for the next tokens.

        Args:
            x: Tokens, int64 [1, T], at the first stage; else hidden states, float32 [1, T, C].

        Returns:
            Output, float32 [1, T, C], not to be modified.

        Raises:
            MalformedMessage: `x` is no input of this stage, or exceeds the text's length.
            NonFinite: The output has inf or NaN.
        """

    def next_token(self, output: Tensor, sampling: Sampling | None) -> int:
        """Choose the token that follows the text, at the last stage.

        Args:
            output: Result of `read` that ends with the last token's output.
            sampling: Settings of the random choice; None: the most likely token.

        Raises:
            NonFinite: A logit is inf or NaN.
        """


class Engine(Protocol):
    """Forward, backward and optimizer of the blocks `layers`.

    A step is `begin_step`; then for each microbatch `forward`, `backward` (at the last stage both
    in one, `forward_backward`) and `weight_gradients`; then `squared_grad_norm` and `apply`.

    * `backward` computes what the previous stage waits for. `weight_gradients` computes the rest at
      any later time, and then the microbatch counts. Gradients are summed in the order of these
      calls.
    * Stages with copies of a weight that trains (`RunSpec.sharing`) exchange `shared_gradient`, and
      set the sum with `set_shared_gradient` before `squared_grad_norm`.
    * A step that begins again has no trace of its first try. A resumed step keeps the microbatches
      that count.

    `OpenStep` does this bookkeeping for any engine.
    """

    @property
    def layers(self) -> LayerRange:
        """Blocks of the stage."""

    @property
    def is_first(self) -> bool:
        """Whether the stage takes tokens and embeds them."""

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head and the loss."""

    @property
    def has_backward(self) -> bool:
        """Whether weights train here or below; otherwise `forward` stores nothing for a `backward`.

        `weight_gradients` then follows `forward` directly, and the microbatch counts.
        """

    @property
    def sends_gradients(self) -> bool:
        """Whether weights train below this stage, so that it sends input gradients."""

    @property
    def num_values(self) -> int:
        """Length of `flat_gradient`, at least 1, so that replicas always have something to sum."""

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state, which do not depend on microbatches.

        Raises:
            OutOfTurn: The stage is not loaded.
        """

    @property
    def microbatch_bytes(self) -> int:
        """Bytes of a full microbatch between two calls, measured so far; 0 before the first.

        A microbatch holds them from its forward until its `weight_gradients`. Shorter samples hold
        less.
        """

    def load(self) -> None:
        """Read this stage's weights and create the optimizer.

        Raises:
            BadLayers, BadModel, RunMismatch: See `Checkpoint.load`.
            BadOption: The run's adapters do not fit the stage's layers.
        """

    # ---- a step

    def begin_step(self, step: StepNumber, num_targets: int) -> None:
        """Start a step, or restart it, without gradients and graphs.

        Args:
            step: Number of the step.
            num_targets: Target tokens of the whole step; the loss is their mean.

        Raises:
            MalformedMessage: There are no targets.
            OutOfTurn: The stage is not loaded.
        """

    def resume_step(
        self, step: StepNumber, counted: frozenset[MicrobatchIndex], gradient: Tensor | None
    ) -> None:
        """Resume the open step with the gradients of the microbatches that count, without graphs.

        Args:
            step: Number of the step.
            counted: Microbatches that count, as the caller knows them.
            gradient: Their sum from `flat_gradient`, if another gradient was set since; else None.

        Raises:
            OutOfTurn: Another step is open, other microbatches count, or one is half done: begin
                the step again.
        """

    def forward(self, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Compute the stage's output and store the graph until `backward`.

        Args:
            microbatch: Index in the step; a second computation replaces the graph.
            x: Tokens, int64 [B, T], at the first stage, see `Samples.token_ids`; else hidden
                states, float32 [B, T, C]. It must not be modified before `backward`.
            lengths: See `Lengths`. Values behind a sample's tokens are padding. No document attends
                to another, and each has its own positions.

        Returns:
            Output, float32 [B, T, C], complete, on the stage's device; not to be modified.

        Raises:
            MalformedMessage: `x` is no input of this stage.
            NonFinite: The output has inf or NaN.
            OutOfTurn: No step is open, or the microbatch had its backward already.
        """

    def forward_backward(
        self, microbatch: MicrobatchIndex, x: Tensor, labels: Tensor, lengths: Lengths = None
    ) -> LossAndGradient:
        """Compute forward, loss and backward of a microbatch at the last stage; see `backward`.

        Args:
            microbatch: Index in the step.
            x: Input, as for `forward`; in a run with one stage the tokens.
            labels: Class of each token, or its id, which position t - 1 predicts, int64 [B, T];
                `NO_LABEL` for tokens that are not learned.
            lengths: Lengths, as for `forward`.

        Raises:
            MalformedMessage, OutOfTurn: See `forward`.
            NonFinite: The loss or the input gradient has inf or NaN.
        """

    # ---- held-out samples: no graph, no dropout, no state; works without an open step

    def infer(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Compute the stage's output for held-out samples.

        Args:
            x: Input, as for `forward`.
            lengths: Lengths, as for `forward`.

        Returns:
            Output, float32 [B, T, C], not to be modified.

        Raises:
            MalformedMessage: `x` is no input of this stage.
            NonFinite: The output has inf or NaN.
        """

    def evaluate(self, x: Tensor, labels: Tensor, lengths: Lengths = None) -> LossAndCounts:
        """Compute the loss of samples at the last stage, and the counts for metrics.

        Args:
            x: Input, as for `forward`.
            labels: Labels, as for `forward_backward`.
            lengths: Lengths, as for `forward`.

        Raises:
            MalformedMessage: See `forward_backward`.
            NonFinite: The loss is inf or NaN.
        """

    # ---- generation; works without an open step

    def begin_text(self, max_tokens: int) -> Text:
        """Begin a text of at most `max_tokens` tokens.

        Raises:
            BadModel: The blocks do not store their state in transformers' cache, or the model is a
                classifier.
            MalformedMessage: The model has fewer positions.
            OutOfTurn: The stage is not loaded.
        """

    # ---- backward

    def backward(self, microbatch: MicrobatchIndex, gradient: Tensor) -> Tensor | None:
        """Compute the input gradient, and keep what `weight_gradients` needs of the graph.

        Args:
            microbatch: Microbatch after its `forward`.
            gradient: Gradient of the output, float32 [B, T, C]. It must not be modified before
                `weight_gradients`.

        Returns:
            Input gradient, float32 [B, T, C]; None if no stage below needs it.

        Raises:
            MalformedMessage: The gradient has another shape or dtype than the output.
            NonFinite: The input gradient has inf or NaN.
            OutOfTurn: The microbatch had no `forward`, or had its backward already.
        """

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        """Compute the weight gradients of a microbatch and free all that it holds.

        The microbatch counts from now on.

        Raises:
            OutOfTurn: The microbatch had no backward, or counts already.
        """

    def squared_grad_norm(self) -> float:
        """Return the sum of squares of this stage's gradients, accumulated in float64.

        Weights that several stages hold count once, at the first stage.

        Raises:
            NonFinite: A gradient has inf, NaN or values above `bounds.MAX_SQUARED_NORM`.
            OutOfTurn: A microbatch had its backward, but no `weight_gradients`. `apply`,
                `flat_gradient` and `shared_gradient` raise this too.
        """

    def apply(self, clip_factor: float, learning_rate: float) -> None:
        """Scale the gradients, update the weights and end the step.

        Args:
            clip_factor: Factor from 0 to 1, see `training_plan.clip_factor`.
            learning_rate: Learning rate of the step, see `training_plan.learning_rate_at`.

        Raises:
            OutOfTurn: No step is open; a step is applied once.
        """

    def apply_sum(
        self, step: StepNumber, total: Tensor, clip_factor: float, learning_rate: float
    ) -> None:
        """Apply a step that other replicas computed, by the sum [n] of their gradients.

        See `apply`.

        Raises:
            MalformedMessage: The sum has another length or dtype.
            OutOfTurn: The stage is not loaded.
        """

    # ---- gradients for exchange

    def flat_gradient(self) -> Tensor:
        """Return all gradients of this stage by name, float32 [n]; zeros for missing ones."""

    def take_sum(self, total: Tensor) -> None:
        """Replace this stage's gradients by the sum [n] over all replicas.

        Only gradients change; `apply` updates the optimizer.

        Raises:
            MalformedMessage: The sum has another length or dtype.
        """

    def shared_gradient(self) -> Tensor:
        """Return the gradients of weights that other stages train too, float32 [n].

        With tied embeddings, the first stage returns its token embeddings' gradient, the last stage
        its head's.
        """

    def set_shared_gradient(self, total: Tensor) -> None:
        """Set the sum [n] of these stages' gradients, which has the same bits at all of them.

        Raises:
            MalformedMessage: The sum has another length or dtype.
        """

    # ---- state as tensors

    def state(self) -> dict[str, Tensor]:
        """Return copies of the whole training state, see `stage.weights`.

        Call it between two steps.
        """

    def state_names(self) -> frozenset[str]:
        """Return the names of the tensors of `state`.

        A block's names are the same in every stage.
        """

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`; an open step is dropped.

        Raises:
            BadSnapshot: The state is not of this stage; nothing was changed.
            OutOfTurn: The stage is not loaded.
        """

    def export(self) -> Iterator[bytes]:
        """Yield this stage's weights as a safetensors file, in pieces of a few MiB.

        The dtype is `RunSpec.result_dtype`. Weights that several stages hold are in the first
        stage's file alone. No call may change weights until the last piece is taken.
        """


# ---- progress of an engine with the microbatches of its open step

Graph = TypeVar("Graph")
Left = TypeVar("Left")


@dataclass(slots=True)
class OpenStep(Generic[Graph, Left]):
    """A try at an optimizer step; each microbatch is in at most one of the three collections.

    Attributes:
        number: Number of the step.
        num_targets: Target tokens of the whole step; the loss is their mean.
        graphs: Graphs of microbatches after their forward.
        products: Operands of the weight gradients, of microbatches after their backward.
        counted: Microbatches whose gradients are summed.

    Raises:
        MalformedMessage: There are no targets.
    """

    number: StepNumber
    num_targets: int
    graphs: dict[MicrobatchIndex, Graph] = field(default_factory=dict)
    products: dict[MicrobatchIndex, Left] = field(default_factory=dict)
    counted: set[MicrobatchIndex] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.num_targets < 1:
            raise MalformedMessage(
                f"step {self.number}: expected 1 target or more, got {self.num_targets}"
            )

    def resume(self, step: StepNumber, counted: Set[MicrobatchIndex]) -> None:
        """Drop the graphs, and keep the microbatches that count.

        Raises:
            OutOfTurn: Another step is open, other microbatches count, or one is half done.
        """
        if (self.number, self.counted) != (step, counted) or self.products:
            raise OutOfTurn(
                f"step {step} cannot be resumed with microbatches {sorted(counted)}: step "
                f"{self.number} is under way, with {sorted(self.counted)}, and half of "
                f"{sorted(self.products)}"
            )
        self.graphs.clear()

    def check_untouched(self, microbatch: MicrobatchIndex) -> None:
        """Check that nothing of a microbatch is in the gradients.

        Raises:
            OutOfTurn: Something is.
        """
        if microbatch in self.counted:
            raise OutOfTurn(f"step {self.number}: microbatch {microbatch} is counted already")
        if microbatch in self.products:
            raise OutOfTurn(f"step {self.number}: microbatch {microbatch} has had its backward")

    def graph_of(self, microbatch: MicrobatchIndex) -> Graph:
        """Return the graph of a microbatch, for its backward.

        Raises:
            OutOfTurn: The microbatch had no forward, or had its backward already.
        """
        self.check_untouched(microbatch)
        if microbatch not in self.graphs:
            raise OutOfTurn(
                f"step {self.number}: backward of microbatch {microbatch} before its forward"
            )
        return self.graphs[microbatch]

    def count(self, microbatch: MicrobatchIndex) -> Left:
        """Take the operands of a microbatch's weight gradients, and count the microbatch.

        It counts even if the weight gradients then fail, so that no caller resumes the step without
        it.

        Raises:
            OutOfTurn: The microbatch had no backward, or counts already.
        """
        if microbatch not in self.products:
            raise OutOfTurn(
                f"step {self.number}: microbatch {microbatch} had no backward, or counts already"
            )
        self.counted.add(microbatch)
        return self.products.pop(microbatch)

    def check_complete(self) -> None:
        """Check that no microbatch is half done.

        Raises:
            OutOfTurn: One is.
        """
        if self.products:
            raise OutOfTurn(
                f"step {self.number}: weights' gradients of microbatches {sorted(self.products)} "
                f"are still to be computed"
            )
