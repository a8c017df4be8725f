"""Plan, reports and commit of one step, computed from the run. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.codec.spec import Direction
from swarm_ft.coordinator.facts.connectivity import Connectivity
from swarm_ft.coordinator.facts.ledger import Ledger, Side
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import (
    CommittedState,
    Measurements,
    PlannedStep,
    Run,
    Snapshot,
)
from swarm_ft.coordinator.plan.membership import joining_of
from swarm_ft.coordinator.plan.routes import (
    NO_WAYS,
    plan_again,
    plan_evaluation,
    plan_microbatches,
    routes_of,
    with_entries,
)
from swarm_ft.ids import BlockIndex, PeerId, SampleId, StepNumber
from swarm_ft.protocol.messages.client import Evaluated, StepCommitted
from swarm_ft.protocol.messages.control import (
    CommitStep,
    EvalSum,
    PlanStep,
    Stage,
    StageReady,
    StepReady,
)
from swarm_ft.protocol.messages.reports import (
    Bitmap,
    BufferCounts,
    GradientTraffic,
    HeldBuffers,
    Traffic,
    summed_by_boundary,
)
from swarm_ft.protocol.spec.best import metric_of
from swarm_ft.protocol.spec.flops import stage_flops
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.tasks import sum_counts, task_of
from swarm_ft.protocol.spec.training_plan import (
    casts_shadows,
    clip_factor,
    evaluates_at,
    evaluation_microbatches,
    learning_rate_at,
    saves_at,
    shadow_microbatches,
    step_samples,
)

MEASURED_STEPS = 5
"""Last steps that the speed of a peer, and of a step, is computed from."""
MAX_MEASURED = 1024
"""Peers whose speed is remembered; a bound, since anybody can make names."""
FORGIVEN = 0.9
FASTER_AT_MOST = 8.0
"""Largest credible speed of a replica, as a multiple of its stage's median. Of two replicas the
slower one is the median.
"""


LinkCaps = Mapping[PeerId, tuple[float, float]]
"""Bytes per second that peers lend of their links, up and down; 0: no limit."""
NO_CAPS: LinkCaps = MappingProxyType({})


def plan_step(run: Run, now_s: float, ways: Connectivity = NO_WAYS) -> tuple[Run, PlanStep]:
    """Return the run with its first uncommitted step planned, and the plan, for all peers.

    Work that peers did in earlier attempts at the step stays done, at the same peers.
    """
    number, stages = StepNumber(run.committed_steps), run.computing
    microbatches, evaluation = _routed(run, number, ways)
    plan = PlanStep(
        run_id=run.run_id,
        attempt=run.attempt.number,
        step=number,
        microbatches=microbatches,
        evaluation=evaluation,
        listeners=run.listeners,
        codecs=run.steering.codecs_at(number),
    )
    step = PlannedStep(
        microbatches=microbatches, stages=stages, evaluation=evaluation, began_s=now_s
    )
    return replace(run, step=step), plan


def _routed(
    run: Run, number: StepNumber, ways: Connectivity
) -> tuple[tuple[Microbatch, ...], tuple[Microbatch, ...]]:
    """Return a step's microbatches that train, and those that are only evaluated.

    Weights do not change within a step, so it can evaluate them; after the last step there is one
    that only evaluates.
    """
    train, stages, seconds = run.spec.train, run.computing, run.measured.seconds
    before = run.step
    microbatches: tuple[Microbatch, ...] = ()
    ledger = run.past.ledger
    if before is None and number < train.num_steps:
        planned = plan_microbatches(train, number, stages, seconds, ledger, ways)
        microbatches = with_entries(planned, stages, ledger)
    first = len(before.microbatches if before is not None else microbatches)
    held_out = evaluation_microbatches(train, first) if evaluates_at(train, number) else ()
    if casts_shadows(train, number) and _is_compressed(run.spec, stages):
        trained = (before.microbatches if before is not None else microbatches)[0]
        held_out = (
            *held_out,
            *shadow_microbatches(train, trained.samples, first + len(held_out)),
        )
    done = run.attempt.done if before is not None else {}
    if before is not None:
        again = plan_again(before, stages, done, seconds, len(held_out))
        began_there = {batch.index for batch in before.microbatches if batch.entry}
        microbatches = with_entries(again, stages, ledger, only=began_there)
    evaluation = plan_evaluation(held_out, stages, done, seconds, ways, ledger)
    return microbatches, with_entries(evaluation, stages, ledger)


def _is_compressed(spec: RunSpec, stages: Sequence[Stage]) -> bool:
    """Whether the forward codec is in use between any stages."""
    return any(not spec.is_cacheable(stage.layers.start) for stage in stages[1:])


def lacks_evaluation(run: Run) -> bool:
    """Whether the weights after the last step are still to be evaluated."""
    steps, train = StepNumber(run.committed_steps), run.spec.train
    is_there = run.past.judged.step == steps
    return steps == train.num_steps and evaluates_at(train, steps) and not is_there


def is_trained(run: Run) -> bool:
    """Whether no step follows: all are committed, or evaluations stopped improving.

    It may have stopped at the weights of the last evaluation: the step that contained it does not
    count.
    """
    past, train = run.past, run.spec.train
    if past.trained_steps is not None:
        return True
    has_stopped = past.judged.step == past.committed_steps and past.judged.stops(train)
    is_at_end = past.committed_steps >= train.num_steps and not lacks_evaluation(run)
    return has_stopped or is_at_end


def best_to_load(run: Run) -> Snapshot | None:
    """Return the best weights of a trained run, if they are still to be loaded as the result."""
    past, best = run.past, run.past.judged.saved
    if not run.spec.train.load_best_model_at_end or past.trained_steps is not None or best is None:
        return None
    is_here = best.step == past.committed_steps
    return None if is_here else next((s for s in past.snapshots if s.step == best.step), None)


def lacks_snapshot(run: Run) -> bool:
    """Whether the weights after the last commit are to be saved, and no snapshot has them."""
    steps = StepNumber(run.committed_steps)
    on_their_way = {snapshot.step for snapshot in run.saving.unlisted}
    is_there = run.past.saved is not None or steps in on_their_way
    is_last = steps >= run.spec.train.num_steps
    return not is_last and saves_at(run.spec.train, steps) and not is_there


def kept_snapshots(run: Run, new: Snapshot) -> tuple[Snapshot, ...]:
    """Return the snapshots to keep with a new one: it, the best, then the newest others."""
    train, best = run.spec.train, run.past.judged.saved
    others = [one for one in run.past.snapshots if one.step < new.step]
    is_kept = train.load_best_model_at_end and best is not None
    spared = [one for one in others if is_kept and best is not None and one.step == best.step]
    room = max(0, train.save_total_limit - 1 - len(spared))
    newest = [one for one in others if one not in spared][-room:] if room else []
    return tuple(sorted((*spared, *newest, new), key=lambda one: one.step))


def with_evaluation(run: Run, step: PlannedStep) -> tuple[Run, Evaluated]:
    """Return the run after a step that evaluated, and the result of the evaluation."""
    train = run.spec.train
    sums = [step.ready[peer].evaluation for peer in run.computing[-1].peers]
    losses: dict[bool, float] = {}
    counts: tuple[int, ...] = ()
    for place, is_compressed in enumerate(train.eval_passes):
        parts = [of_peer[place] for of_peer in sums if place < len(of_peer)]
        num_targets = sum(one.num_targets for one in parts)
        counts = counts or sum_counts(one.counts for one in parts)
        losses[is_compressed] = math.fsum(one.loss_sum for one in parts) / max(1, num_targets)
    found = Evaluated(
        step=StepNumber(run.committed_steps),
        num_samples=train.num_eval_samples,
        eval_loss=losses.get(False),
        compressed_eval_loss=losses.get(True),
        counts=counts,
        traffic=summed_by_boundary(
            sent.of_evaluation for peer in run.peers for sent in step.ready[peer].traffic
        ),
    )
    value = metric_of(train, found.loss, found.counts)
    # After the last step the peers have these weights, and no snapshot is needed.
    is_saved = run.past.saved is not None or found.step == train.num_steps
    judged = run.past.judged.after(train, found.step, value, is_saved=is_saved)
    past = replace(
        run.past,
        judged=judged,
        last_evaluation=found,
        sent=run.past.sent + found.sent,
        traffic=summed_by_boundary((*run.past.traffic, *found.traffic)),
    )
    return replace(run, past=past), found


def compression_excess(run: Run, step: PlannedStep) -> float | None:
    """Return what compression added to a step's loss, in nats per target; None if not measured.

    The comparison uses the same weights and samples: those of its first microbatch.
    """
    reports = [step.ready[peer] for peer in run.computing[-1].peers]
    shadowed = _mean_loss(report.shadowed for report in reports)
    shadows = _mean_loss(report.shadows for report in reports)
    return None if shadowed is None or shadows is None else shadowed - shadows


def _mean_loss(reports: Iterable[EvalSum | None]) -> float | None:
    sums = [one for one in reports if one is not None]
    num_targets = sum(one.num_targets for one in sums)
    return math.fsum(one.loss_sum for one in sums) / num_targets if num_targets else None


def tokens_for(run: Run, plan: PlanStep, peer: PeerId) -> tuple[SampleId, ...]:
    """Return samples whose tokens a peer needs: inputs at the first stage, targets at the last."""
    stages = run.computing
    ends = {0: stages[0], len(stages) - 1: stages[-1]}
    return tuple(
        sample
        for index, stage in ends.items()
        if peer in stage.peers
        for batch in (*plan.microbatches, *plan.evaluation)
        if stage.peers[batch.replica_at(index)] == peer and batch.is_to_do(index)
        for sample in batch.samples
    )


def commit_step(
    run: Run, step: PlannedStep, now_s: float, caps: LinkCaps = NO_CAPS
) -> tuple[Run, StepCommitted, CommitStep]:
    """Return the run after a step that all peers are ready for, its result, and the commit message.

    The loss is the mean over all target tokens of the batch; gradients are clipped by the norm over
    all stages.
    """
    train, number = run.spec.train, StepNumber(run.committed_steps)
    reports = [step.ready[peer] for peer in run.peers]
    stages = run.computing
    # Replicas of a stage have one gradient, so any of them has its norm.
    norms = [step.ready[stage.peers[0]].squared_grad_norm for stage in stages]
    grad_norm = math.sqrt(math.fsum(norms))
    loss_sum = math.fsum(step.ready[peer].loss_sum for peer in stages[-1].peers)
    num_targets = sum(step.ready[peer].num_targets for peer in stages[-1].peers)
    commit = CommitStep(
        run_id=run.run_id,
        attempt=run.attempt.number,
        step=number,
        clip_factor=clip_factor(train, grad_norm),
        learning_rate=_learning_rate(run, number),
    )
    committed = StepCommitted(
        step=number,
        loss=loss_sum / max(1, num_targets),
        learning_rate=commit.learning_rate,
        grad_norm=grad_norm,
        num_samples=len(step_samples(train, number)),
        seconds=now_s - step.began_s,
        traffic=summed_by_boundary(
            # An evaluation's traffic includes that of shadows.
            t.of_training if evaluates_at(train, number) else t
            for report in reports
            for t in report.traffic
        ),
        gradients=sum((report.gradients for report in reports), GradientTraffic()),
        state_bytes=run.measured.state_bytes,
    )
    after = replace(
        run,
        detail=joining_of(run),
        past=_past_after(run, step, committed, commit),
        step=None,
        unplaced_since_s=math.inf,
        doubts=MappingProxyType({p: step for p, step in run.doubts.items() if step > number}),
        measured=_measured_after(run, step, committed, caps),
    )
    return after, committed, commit


def _learning_rate(run: Run, step: StepNumber) -> float:
    """Return the rate of the run's schedule, whose peak a request may have changed."""
    scheduled, submitted = learning_rate_at(run.spec.train, step), run.spec.train.learning_rate
    peak = run.steering.peak_at(step, submitted)
    return scheduled if peak == submitted else scheduled / submitted * peak


def _past_after(
    run: Run, step: PlannedStep, committed: StepCommitted, commit: CommitStep
) -> CommittedState:
    past, steps = run.past, commit.step + 1
    computing = [peer for stage in run.computing for peer in stage.peers]
    return replace(
        past,
        committed_steps=steps,
        last_commit=commit,
        committers=frozenset(computing),
        holds=MappingProxyType(dict.fromkeys(computing, steps)),
        last_step=committed,
        sent=past.sent + committed.sent,
        traffic=summed_by_boundary((*past.traffic, *committed.traffic)),
        ledger=past.ledger
        and past.ledger.after(routes_of(_that_leave_buffers(run, step), step.stages)),
    )


def _that_leave_buffers(run: Run, step: PlannedStep) -> tuple[Microbatch, ...]:
    """Return the microbatches that leave buffers; held-out samples leave only constants."""
    held_out = step.evaluation if run.spec.caches_frozen_prefix else ()
    is_shadow = run.spec.train.is_shadow
    return (*step.microbatches, *(one for one in held_out if not is_shadow(one.samples[0])))


def _measured_after(
    run: Run, step: PlannedStep, committed: StepCommitted, caps: LinkCaps
) -> Measurements:
    before = run.measured
    num_targets = sum(step.ready[peer].num_targets for peer in run.computing[-1].peers)
    seconds = {}
    flops_per_s = dict(before.flops_per_s)
    for index, stage in enumerate(run.computing):
        newest = {}
        flops = stage_flops(run.spec, stage.layers)
        for replica, peer in enumerate(stage.peers):
            link_s = _link_s(run, step, index, replica, caps.get(peer))
            busy_s = max(step.ready[peer].compute_s, min(link_s, committed.seconds))
            share = step.share(index, replica)
            newest[peer] = _newest(before.seconds.get(peer, ()), busy_s, share)
            if share and step.ready[peer].compute_s:
                rates = (*flops_per_s.pop(peer, ()), share * flops / step.ready[peer].compute_s)
                flops_per_s[peer] = rates[-MEASURED_STEPS:]
        for peer, latest in _in_line(newest).items():
            seconds[peer] = (*before.seconds.get(peer, ()), *latest)[-MEASURED_STEPS:]
    return Measurements(
        seconds=MappingProxyType(seconds),
        flops_per_s=MappingProxyType(dict(list(flops_per_s.items())[-MAX_MEASURED:])),
        step_seconds=(*before.step_seconds, committed.seconds)[-MEASURED_STEPS:],
        step_targets=(*before.step_targets, num_targets)[-MEASURED_STEPS:],
        buffers=before.buffers,
    )


def _link_s(
    run: Run, step: PlannedStep, index: int, replica: int, caps: tuple[float, float] | None
) -> float:
    """Return how long a step's microbatches kept a replica's limited link busy; 0 without a limit.

    Its incoming bytes are its share of the bytes that the adjoining stages report as sent there.
    """
    if caps is None:
        return 0.0
    stages, ready = run.computing, step.ready
    stage = stages[index]

    def sent_by(some: Iterable[Stage]) -> list[Traffic]:
        return [sent for one in some for peer in one.peers for sent in ready[peer].traffic]

    own = ready[stage.peers[replica]].traffic
    ahead, behind = sent_by(stages[:index][-1:]), sent_by(stages[index + 1 :][:1])
    incoming_bytes = sum(t.forward_bytes for t in ahead if t.boundary == stage.layers.start)
    incoming_bytes += sum(t.backward_bytes for t in behind if t.boundary == stage.layers.stop)
    whole = sum(step.share(index, other) for other in range(len(stage.peers)))
    received = incoming_bytes * step.share(index, replica) / max(1, whole)
    up, down = (cap or math.inf for cap in caps)
    return max(sum(t.forward_bytes + t.backward_bytes for t in own) / up, received / down)


def _newest(before: tuple[float, ...], busy_s: float, count: int) -> float | None:
    """Return a replica's seconds per microbatch; None if unknown."""
    if count:
        return busy_s / count
    # A replica that got no microbatch counts as faster each time, so that it is tried again.
    return before[-1] * FORGIVEN if before else None


def _in_line(newest: Mapping[PeerId, float | None]) -> dict[PeerId, tuple[float, ...]]:
    """Return the seconds that replicas report, each within a credible range of the others.

    `commits.step_ready` already limits each report to the step's own duration.
    """
    known = [seconds for seconds in newest.values() if seconds is not None]
    least = statistics.median_high(known) / FASTER_AT_MOST if known else 0.0
    bounded = {peer: max(s, least) if s is not None else 0.0 for peer, s in newest.items()}
    return {peer: (seconds,) if seconds > 0.0 else () for peer, seconds in bounded.items()}


def measured_on(run: Run) -> Measurements:
    """Return the measurements of a run's peers at the stages that they start on, maybe new ones."""
    known, seconds = run.measured.flops_per_s, dict(run.measured.seconds)
    for assignment in run.attempt.assignments:
        flops = stage_flops(run.spec, assignment.layers)
        if assignment.peer_id in known:
            seconds[assignment.peer_id] = tuple(flops / rate for rate in known[assignment.peer_id])
    return replace(run.measured, seconds=MappingProxyType(seconds))


# ---- reports of buffers, and their effect on the ledger
#
# Only commits are written, see `commits`. Every peer that joins a restarted coordinator reports
# its inventory again, and with it all losses.

MAX_COUNT = 1 << 48
"""Largest count of one peer; sums over all peers must fit their fields whatever peers report."""


def with_ledger(run: Run) -> Run:
    """Return the run with a ledger of its pipeline's boundaries, if these have buffers.

    A ledger of other boundaries is dropped.
    """
    train = run.spec.train
    boundaries = tuple(BlockIndex(stage.layers.start) for stage in run.stages[1:])
    has_buffers = any(train.codec(direction).is_delta for direction in Direction)
    entry, ledger = (
        run.spec.first_uncached_stage(stage.layers for stage in run.stages),
        run.past.ledger,
    )
    if not boundaries or not (has_buffers or entry):
        return run.with_ledger(None)
    if ledger is None or ledger.boundaries != boundaries:
        ledger = Ledger.empty(boundaries, run.spec.num_buffered_samples)
    return run.with_ledger(replace(ledger, entry=entry))


def ends_of(run: Run, peer_id: PeerId) -> dict[BlockIndex, Side]:
    """Return the boundaries of a peer's stage, and its side of each."""
    last = len(run.stages) - 1
    ends = {}
    for index, stage in enumerate(run.stages):
        if peer_id in stage.peers and index > 0:
            ends[BlockIndex(stage.layers.start)] = Side.DOWNSTREAM
        if peer_id in stage.peers and index < last:
            ends[BlockIndex(stage.layers.stop)] = Side.UPSTREAM
    return ends


def report_refusal(run: Run, peer_id: PeerId, report: StageReady | StepReady) -> Reason | None:
    """Return why a peer's report of its buffers or evaluation is invalid; None if it is valid."""
    inventory = report.buffers if isinstance(report, StageReady) else report.lost
    boundaries = ends_of(run, peer_id)
    for boundary in (buffers.boundary for buffers in (*inventory, *report.buffers)):
        if boundary not in boundaries:
            stage = next(one.layers for one in run.stages if peer_id in one.peers)
            kind = ReasonKind.INVALID_BOUNDARY
            return Reason(kind=kind, amount=boundary, layers=(stage,))
    if isinstance(report, StepReady):
        num_counts = task_of(run.spec.train).num_counts
        for sums in report.evaluation:
            if len(sums.counts) not in (0, num_counts):
                kind, count = ReasonKind.INVALID_COUNTS, len(sums.counts)
                return Reason(kind=kind, amount=count, limit=num_counts)
    bound = Bitmap(run.spec.num_buffered_samples)
    refusals = (bound.refusal(buffers.samples.bitmap) for buffers in inventory)
    text = next(filter(None, refusals), None)
    return Reason(kind=ReasonKind.INVALID_SAMPLES, text=text) if text else None


def took_stock(run: Run, peer_id: PeerId, held: Iterable[HeldBuffers]) -> Run:
    """Return the run after a peer reported its inventory."""
    ledger = run.past.ledger
    if ledger is None:
        return run
    known = {buffers.boundary: buffers.samples for buffers in held}
    return run.with_ledger(ledger.with_inventory(peer_id, known))


def with_buffer_report(run: Run, peer_id: PeerId, ready: StepReady) -> Run:
    """Return the run after a peer reported lost buffers, and the sizes of the others."""
    ledger = run.past.ledger
    for lost in ready.lost if ledger else ():
        ledger = ledger and ledger.without(peer_id, lost.boundary, lost.samples)
    counts = dict(run.measured.buffers.get(peer_id, {}))
    for new in ready.buffers:
        counts[new.boundary] = _sum(counts.get(new.boundary), new)
    reported = MappingProxyType({**run.measured.buffers, peer_id: MappingProxyType(counts)})
    return replace(run.with_ledger(ledger), measured=replace(run.measured, buffers=reported))


def _sum(before: BufferCounts | None, new: BufferCounts) -> BufferCounts:
    """Return the present sizes, and the sums of all events so far."""
    if before is not None:
        new = replace(before, samples=0, memory_bytes=0, disk_bytes=0) + new
    return new.at_most(MAX_COUNT)
