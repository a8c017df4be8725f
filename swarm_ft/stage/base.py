"""What a peer asks of the engine that trains its stage. Any object with these methods will do.

Shapes: B samples, T tokens, C channels, V vocabulary. Everything is synchronous and is called in
one compute thread, but for the properties, which any thread may read. Tensors come and go on the
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
"""Tokens of each sample of a microbatch, or of each document of a sample that several share; None
if all samples are one document, as long as the microbatch's tensor."""


def is_packed(lengths: Lengths) -> bool:
    """Whether several documents share a sample."""
    return any(isinstance(one, tuple) for one in lengths or ())


def tokens_of(lengths: Sequence[int | tuple[int, ...]]) -> list[int]:
    """Tokens of each sample [B]."""
    return [sum(one) if isinstance(one, tuple) else one for one in lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossAndGradient:
    """What the last stage makes of a microbatch.

    Attributes:
        loss_sum: cross-entropy in nats, summed over the microbatch's targets.
        input_gradient: float32 [B, T, C] of the step's mean loss; None if nobody waits for it.
    """

    loss_sum: float
    input_gradient: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossAndCounts:
    """What the last stage makes of a microbatch that is only evaluated.

    Attributes:
        loss_sum: cross-entropy in nats, summed over the microbatch's targets.
        counts: of them, that the task's metrics are made of; see `Task.num_counts`.
    """

    loss_sum: float
    counts: tuple[int, ...] = ()


class Text(Protocol):
    """A text that is continued at a stage, which keeps what its blocks need of it."""

    @property
    def num_bytes(self) -> int:
        """What it takes once it has as many tokens as it may have."""

    def read(self, x: Tensor) -> Tensor:
        """Compute the stage's output for the tokens that follow.

        Args:
            x: at the first stage int64 tokens [1, T], else float32 [1, T, C].

        Returns:
            Float32 [1, T, C], not to be written to.

        Raises:
            MalformedMessage: `x` is not what this stage takes, or more than the text may have.
            NonFinite: the output is inf or NaN.
        """

    def next_token(self, output: Tensor, sampling: Sampling | None) -> int:
        """The token that is to follow all that was read, at the last stage.

        Args:
            output: of `read`, with the last token's at its end.
            sampling: how it is drawn; None chooses the likeliest.

        Raises:
            NonFinite: a logit is inf or NaN.
        """


class Engine(Protocol):
    """Forward, backward and optimizer of blocks `layers`.

    A step is `begin_step`, then per microbatch `forward`, `backward` (last stage: both in one,
    `forward_backward`) and `weight_gradients`, then `squared_grad_norm` and `apply`. A backward
    computes what the stage upstream waits for; `weight_gradients` does the rest whenever there is
    time, and then the microbatch is counted. Gradients are summed in the order of these calls.
    Stages that hold copies of a weight that trains (`RunSpec.sharing`) exchange `shared_gradient`
    and all `set_shared_gradient` the sum in between, before `squared_grad_norm`. A step that is
    begun again keeps no trace of its first attempt; one that is resumed keeps the microbatches that
    were counted. `OpenStep` keeps the books of this for any engine.
    """

    @property
    def layers(self) -> LayerRange:
        """The stage's blocks."""

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens, and embeds them."""

    @property
    def is_last(self) -> bool:
        """Whether it has the head and the loss."""

    @property
    def has_backward(self) -> bool:
        """Whether anything trains here or below. Else `forward` keeps nothing for a `backward`.

        `weight_gradients` follows it then, and counts the microbatch.
        """

    @property
    def sends_gradients(self) -> bool:
        """Whether anything trains below this stage, and so waits for its input's gradients."""

    @property
    def num_values(self) -> int:
        """How long `flat_gradient` is: 1 or more, so that replicas always have something to sum."""

    @property
    def state_bytes(self) -> int:
        """What is there however many microbatches are: weights, gradients, the optimizer's state.

        Raises:
            OutOfTurn: not loaded.
        """

    @property
    def microbatch_bytes(self) -> int:
        """What a whole microbatch holds between two calls, as those so far tell; 0 before them.

        It holds it from its forward until its `weight_gradients` are done. Samples may be shorter
        than the run's longest, and then it holds less.
        """

    def load(self) -> None:
        """Read this stage's weights and make the optimizer.

        Raises:
            BadLayers, BadModel, RunMismatch: see `Checkpoint.load`.
            BadOption: the run's adapters cannot stand beside the stage's layers.
        """

    # ---- a step

    def begin_step(self, step: StepNumber, num_targets: int) -> None:
        """Start a step, or start it again: no gradients, no graphs.

        Args:
            step: its number.
            num_targets: target tokens of the whole step; its loss is the mean over them.

        Raises:
            MalformedMessage: no targets.
            OutOfTurn: not loaded.
        """

    def resume_step(
        self, step: StepNumber, counted: frozenset[MicrobatchIndex], gradient: Tensor | None
    ) -> None:
        """Go on with the step under way: no graphs, the gradients of the counted microbatches.

        Args:
            step: its number.
            counted: the microbatches, as the caller knows them.
            gradient: their sum as `flat_gradient` gave it, if another was set since.

        Raises:
            OutOfTurn: another step is under way, or others are counted, or one has had its
                backward and no more: begin it again.
        """

    def forward(self, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Compute the stage's output and keep the graph until `backward`.

        Args:
            microbatch: its index in the step; computing it again replaces its graph.
            x: at the first stage int64 tokens [B, T], see `Samples.token_ids`, else float32
                [B, T, C]. It is kept: the caller must not write to it before `backward`.
            lengths: see `Lengths`; what is behind a sample's tokens pads. No document attends to
                another, and the positions of each begin anew.

        Returns:
            Float32 [B, T, C] where the stage computes, and complete; not to be written to.

        Raises:
            MalformedMessage: `x` is not what this stage takes.
            NonFinite: the output is inf or NaN.
            OutOfTurn: no step, or the microbatch has had its backward already.
        """

    def forward_backward(
        self, microbatch: MicrobatchIndex, x: Tensor, labels: Tensor, lengths: Lengths = None
    ) -> LossAndGradient:
        """Forward, loss and backward of a microbatch, at the last stage; see `backward`.

        Args:
            microbatch: its index in the step.
            x: as `forward` takes it; in a one-stage swarm the tokens.
            labels: int64 [B, T], of each token its class, or its id, which position t - 1
                predicts; `NO_LABEL` if it is not learned.
            lengths: as `forward` takes them.

        Raises:
            MalformedMessage, OutOfTurn: as `forward`.
            NonFinite: the loss or the input's gradient is inf or NaN.
        """

    # ---- held-out samples: no graph, no dropout, nothing kept; a step need not be open

    def infer(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Compute the stage's output for samples that are only evaluated.

        Args:
            x: as `forward` takes it.
            lengths: so too.

        Returns:
            Float32 [B, T, C], not to be written to.

        Raises:
            MalformedMessage: `x` is not what this stage takes.
            NonFinite: the output is inf or NaN.
        """

    def evaluate(self, x: Tensor, labels: Tensor, lengths: Lengths = None) -> LossAndCounts:
        """Compute the loss of samples at the last stage, and how many targets are told rightly.

        Args:
            x: as `forward` takes it.
            labels: as `forward_backward` takes them.
            lengths: as `forward` takes them.

        Raises:
            MalformedMessage: as `forward_backward`.
            NonFinite: the loss is inf or NaN.
        """

    # ---- a text that is continued: no step need be open

    def begin_text(self, max_tokens: int) -> Text:
        """Make room for a text of at most so many tokens, nothing of which is read.

        Raises:
            BadModel: the model's blocks do not keep what they need of a text in transformers' own
                cache, or it tells classes.
            MalformedMessage: the model has fewer positions.
            OutOfTurn: not loaded.
        """

    # ---- what trains, back

    def backward(self, microbatch: MicrobatchIndex, gradient: Tensor) -> Tensor | None:
        """Compute the input's gradient and free the graph; keep what `weight_gradients` needs.

        Args:
            microbatch: one that `forward` computed.
            gradient: float32 [B, T, C], of the output. It is kept: the caller must not write to
                it before `weight_gradients`.

        Returns:
            The input's gradient, float32 [B, T, C]; None if nobody below waits for it.

        Raises:
            MalformedMessage: another shape or dtype than the output's.
            NonFinite: the input's gradient is inf or NaN.
            OutOfTurn: `forward` did not compute it, or it has had its backward already.
        """

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        """Complete the weights' gradients by the microbatch's, and let go of all it holds.

        From now on it is counted.

        Raises:
            OutOfTurn: it has had no backward, or is counted already.
        """

    def squared_grad_norm(self) -> float:
        """Sum of squares of this stage's gradients, accumulated in float64.

        Weights of which several stages hold copies count once, at the first stage.

        Raises:
            NonFinite: a gradient is inf, NaN or as good as that, see `bounds.MAX_SQUARED_NORM`.
            OutOfTurn: a microbatch has had its backward and no `weight_gradients`; so too for
                `apply`, `flat_gradient` and `shared_gradient`.
        """

    def apply(self, clip_factor: float, learning_rate: float) -> None:
        """Scale the gradients, step the weights and end the step.

        Args:
            clip_factor: from 0 to 1, see `training_plan.clip_factor`.
            learning_rate: of this step, see `training_plan.learning_rate_at`.

        Raises:
            OutOfTurn: no step has begun, as after a first `apply`: a step counts once.
        """

    def apply_sum(
        self, step: StepNumber, total: Tensor, clip_factor: float, learning_rate: float
    ) -> None:
        """Apply a step that others computed, the sum [n] of whose gradients is known; see `apply`.

        Raises:
            MalformedMessage: the sum has another length or dtype.
            OutOfTurn: not loaded.
        """

    # ---- gradients on their way to others

    def flat_gradient(self) -> Tensor:
        """All gradients of this stage, float32 [n], by name; zeros for none, a zero for nothing."""

    def take_sum(self, total: Tensor) -> None:
        """Go on with the sum [n] of all replicas' gradients in the place of this one's.

        Nothing but gradients changes: moments do so at `apply`.

        Raises:
            MalformedMessage: of another length or dtype.
        """

    def shared_gradient(self) -> Tensor:
        """Gradients of weights that other stages hold and train too, float32 [n], in one order.

        Of tied embeddings the first stage gives its token embeddings', the last its head's.
        """

    def set_shared_gradient(self, total: Tensor) -> None:
        """Take the sum [n] of all these stages' gradients; the same bits at all of them.

        Raises:
            MalformedMessage: of another length or dtype.
        """

    # ---- the stage as tensors

    def state(self) -> dict[str, Tensor]:
        """Copies of all that training goes on from, see `stage.weights`; best between two steps."""

    def state_names(self) -> frozenset[str]:
        """What the tensors of `state` are called; a block's are called alike in any stage."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state` as if this stage had come to it; an open step is dropped.

        Raises:
            BadSnapshot: it is not a state of this stage; nothing was changed.
            OutOfTurn: not loaded.
        """

    def export(self) -> Iterator[bytes]:
        """This stage's weights as a safetensors shard, in pieces of a few MiB.

        They are of `RunSpec.result_dtype`.

        Of what several stages hold the first one's shard alone has it. Until the last piece is
        taken nothing may be called that changes weights.
        """


# ---- how far an engine is with each microbatch of its open step

Graph = TypeVar("Graph")
Left = TypeVar("Left")


@dataclass(slots=True)
class OpenStep(Generic[Graph, Left]):
    """One attempt at an optimizer step; a microbatch is in one of its three places at most.

    Attributes:
        number: the step's.
        num_targets: target tokens of the whole step; its loss is the mean over them.
        graphs: what a microbatch's forward left for its backward.
        left: what its backward left for its weights' gradients.
        counted: those whose gradients are summed.

    Raises:
        MalformedMessage: no targets.
    """

    number: StepNumber
    num_targets: int
    graphs: dict[MicrobatchIndex, Graph] = field(default_factory=dict)
    left: dict[MicrobatchIndex, Left] = field(default_factory=dict)
    counted: set[MicrobatchIndex] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.num_targets < 1:
            raise MalformedMessage(
                f"step {self.number}: expected 1 target or more, got {self.num_targets}"
            )

    def resume(self, step: StepNumber, counted: Set[MicrobatchIndex]) -> None:
        """Drop what is under way, and keep what is counted.

        Raises:
            OutOfTurn: it is another step, or others are counted, or one is so by half.
        """
        if (self.number, self.counted) != (step, counted) or self.left:
            raise OutOfTurn(
                f"step {step} cannot be resumed with microbatches {sorted(counted)}: step "
                f"{self.number} is under way, with {sorted(self.counted)}, and half of "
                f"{sorted(self.left)}"
            )
        self.graphs.clear()

    def check_untouched(self, microbatch: MicrobatchIndex) -> None:
        """Whether nothing of a microbatch is in the gradients.

        Raises:
            OutOfTurn: something is.
        """
        if microbatch in self.counted:
            raise OutOfTurn(f"step {self.number}: microbatch {microbatch} is counted already")
        if microbatch in self.left:
            raise OutOfTurn(f"step {self.number}: microbatch {microbatch} has had its backward")

    def graph_of(self, microbatch: MicrobatchIndex) -> Graph:
        """What there is for a backward.

        Raises:
            OutOfTurn: the microbatch has had no forward, or its backward already.
        """
        self.check_untouched(microbatch)
        if microbatch not in self.graphs:
            raise OutOfTurn(f"step {self.number}: backward of microbatch {microbatch} came first")
        return self.graphs[microbatch]

    def count(self, microbatch: MicrobatchIndex) -> Left:
        """Take what there is for the weights' gradients.

        It counts from now on, so should they fail, nobody who knows of it less resumes the step.

        Raises:
            OutOfTurn: the microbatch has had no backward, or is counted already.
        """
        if microbatch not in self.left:
            raise OutOfTurn(f"step {self.number}: nothing is left of microbatch {microbatch}")
        self.counted.add(microbatch)
        return self.left.pop(microbatch)

    def check_complete(self) -> None:
        """Whether no microbatch is in the gradients by half.

        Raises:
            OutOfTurn: one is.
        """
        if self.left:
            raise OutOfTurn(
                f"step {self.number}: the weights' gradients of microbatches {sorted(self.left)} "
                f"are still to be computed"
            )
