"""What the coordinator says to peers, as frozen values. Protobuf is met only in `coordinator_wire`.

Tokens travel as little-endian uint32 bytes, so that the coordinator can pass them on unread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby

from swarm_ft.ids import NO_ATTEMPT, Attempt, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.run_spec import RunSpec
from swarm_ft.protocol.training_plan import Microbatch


@dataclass(frozen=True, kw_only=True, slots=True)
class StageAssignment:
    """Which peer hosts which blocks. Replicas of a stage follow each other, in a fixed order."""

    peer_id: PeerId
    layers: LayerRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage and its replicas."""

    layers: LayerRange
    peers: tuple[PeerId, ...]


def stages_of(
    assignments: Iterable[StageAssignment], *, but: Collection[PeerId] = ()
) -> tuple[Stage, ...]:
    """The pipeline that assignments make without these peers, first stage to last."""
    left_out = set(but)
    others = (a for a in assignments if a.peer_id not in left_out)
    groups = groupby(others, key=lambda assignment: assignment.layers)
    return tuple(Stage(layers=r, peers=tuple(a.peer_id for a in group)) for r, group in groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStage:
    """A stage of a snapshot: a file of that digest and length."""

    layers: LayerRange
    digest: bytes
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Taker:
    """A peer that takes its stage's state over from other replicas.

    It listens meanwhile: it gets the sums of their gradients, to apply them once it has the
    state. Where tied embeddings are synchronised it cannot, and all wait for it.

    Attributes:
        step: how many steps are in the state.
        donors: replicas that offer it.
    """

    peer_id: PeerId
    step: StepNumber
    donors: tuple[PeerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assign:
    """Host a stage, connect to the neighbours, say StageReady.

    Attributes:
        stages: all peers of the run, first stage to last, replicas beside each other.
        fresh: load the snapshot, or the weights that the run began with, whatever is held.
        spec_digest: of the spec, as the coordinator computes it; the peer computes its own.
        takers: peers that do not hold their stage's state yet, each to be told to `TakeStage`.
        last_attempt: whose commit is the last.
        saved: the snapshot of the committed steps, if the run went back to it.
    """

    run_id: RunId
    spec: RunSpec
    attempt: Attempt
    stages: tuple[StageAssignment, ...]
    committed_steps: int
    fresh: bool
    spec_digest: bytes
    takers: tuple[Taker, ...] = ()
    last_attempt: Attempt = NO_ATTEMPT
    saved: tuple[SavedStage, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStage:
    """Put the stage's state, which has so many steps in it, into the run's snapshots."""

    run_id: RunId
    step: StepNumber


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeStage:
    """To a taker of the assignment: these peers offer the stage's state, with this digest."""

    run_id: RunId
    attempt: Attempt
    digest: bytes
    donors: tuple[PeerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStep:
    """Run one step: of all microbatches, those whose route passes this peer.

    Attributes:
        listeners: peers that no microbatch passes, and that have no gradient; routes are over the
            others, in their order.
        tokens: sample to little-endian uint32 ids, at the first and the last stage.
        traced: whether somebody wants to know what peers do when, see `timeline`.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    microbatches: tuple[Microbatch, ...]
    listeners: tuple[PeerId, ...] = ()
    tokens: dict[SampleId, bytes] = field(default_factory=dict)
    traced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitStep:
    """The step counts: scale the gradients, step the optimizer, make staged buffers real.

    Attributes:
        attempt: the one whose gradients count.
    """

    run_id: RunId
    attempt: Attempt
    step: StepNumber
    clip_factor: float
    learning_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportStage:
    """The run is trained: write the stage down and serve it until it is collected."""

    run_id: RunId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseStage:
    """Let go of the run."""

    run_id: RunId
    reason: str


@dataclass(frozen=True, slots=True)
class ClockReply:
    """The coordinator's time when a probe came, and the probe's `sent_us`."""

    sent_us: int
    coordinator_us: int


ToPeer = (
    Assign | TakeStage | SaveStage | PlanStep | CommitStep | ExportStage | ReleaseStage | ClockReply
)
