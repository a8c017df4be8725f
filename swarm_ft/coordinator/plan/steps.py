"""One step's plan, what peers report of it, and its commit, computed from the run. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.ledger import Ledger, Side
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Measured, Past, PlannedStep, Run, Snapshot
from swarm_ft.coordinator.facts.ways import Ways
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
from swarm_ft.protocol.spec.codec_spec import Direction
from swarm_ft.protocol.spec.flops import stage_flops
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.tasks import summed, task_of
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
"""How many a peer's speed, and that of a step, is told from."""
MAX_MEASURED = 1024
"""Peers of whom it is remembered how fast they computed; names cost nothing."""
FORGIVEN = 0.9
FASTER_AT_MOST = 8.0
"""So many times as fast as its stage's median a replica may be thought, whatever it tells. Of two
the slower one is the median."""


LinkCaps = Mapping[PeerId, tuple[float, float]]
"""Bytes a second that peers lend of their links, up and down; 0: all there is."""
NO_CAPS: LinkCaps = MappingProxyType({})


def plan_step(run: Run, now_s: float, ways: Ways = NO_WAYS) -> tuple[Run, PlanStep]:
    """The run with its first uncommitted step planned, and the plan, for everybody.

    What peers have done of it in earlier attempts stays done, and with whom.
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
    run: Run, number: StepNumber, ways: Ways
) -> tuple[tuple[Microbatch, ...], tuple[Microbatch, ...]]:
    """Of a step, the microbatches that train and those that are only evaluated.

    The weights do not change within a step, so it is a time to evaluate them; after the last one
    there is a step that does nothing else.
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
    """Whether the forward codec is at work between any stages."""
    return any(not spec.is_constant(stage.layers.start) for stage in stages[1:])


def lacks_evaluation(run: Run) -> bool:
    """Whether the weights after the last step are still to be evaluated."""
    steps, train = StepNumber(run.committed_steps), run.spec.train
    is_there = run.past.judged.step == steps
    return steps == train.num_steps and evaluates_at(train, steps) and not is_there


def is_trained(run: Run) -> bool:
    """Whether no step is to follow: all were made, or evaluations were no better for long enough.

    It may have stopped at the weights of the last evaluation alone: the step that was made with it
    does not count.
    """
    past, train = run.past, run.spec.train
    if past.trained_steps is not None:
        return True
    has_stopped = past.judged.step == past.committed_steps and past.judged.stops(train)
    is_at_end = past.committed_steps >= train.num_steps and not lacks_evaluation(run)
    return has_stopped or is_at_end


def best_to_load(run: Run) -> Snapshot | None:
    """Of a run that is trained: the best weights, if they are to be the result and are not here."""
    past, best = run.past, run.past.judged.saved
    if not run.spec.train.load_best_model_at_end or past.trained_steps is not None or best is None:
        return None
    is_here = best.step == past.committed_steps
    return None if is_here else next((s for s in past.snapshots if s.step == best.step), None)


def lacks_snapshot(run: Run) -> bool:
    """Whether the weights after the last commit are to be saved, and are not yet."""
    steps = StepNumber(run.committed_steps)
    on_their_way = {snapshot.step for snapshot in run.saving.unlisted}
    is_there = run.past.saved is not None or steps in on_their_way
    is_last = steps >= run.spec.train.num_steps
    return not is_last and saves_at(run.spec.train, steps) and not is_there


def kept_snapshots(run: Run, new: Snapshot) -> tuple[Snapshot, ...]:
    """Those that are there once a new one is: the newest, the best, then others, newest first."""
    train, best = run.spec.train, run.past.judged.saved
    others = [one for one in run.past.snapshots if one.step < new.step]
    is_kept = train.load_best_model_at_end and best is not None
    spared = [one for one in others if is_kept and best is not None and one.step == best.step]
    room = max(0, train.save_total_limit - 1 - len(spared))
    newest = [one for one in others if one not in spared][-room:] if room else []
    return tuple(sorted((*spared, *newest, new), key=lambda one: one.step))


def evaluated(run: Run, step: PlannedStep) -> tuple[Run, Evaluated]:
    """The run after all are ready with a step that evaluated, and what came of that."""
    train = run.spec.train
    sums = [step.ready[peer].evaluation for peer in run.computing[-1].peers]
    losses: dict[bool, float] = {}
    counts: tuple[int, ...] = ()
    for place, is_compressed in enumerate(train.eval_passes):
        told = [of_peer[place] for of_peer in sums if place < len(of_peer)]
        num_targets = sum(one.num_targets for one in told)
        counts = counts or summed(one.counts for one in told)
        losses[is_compressed] = math.fsum(one.loss_sum for one in told) / max(1, num_targets)
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
    # After the last step they are with the peers, and need not be saved.
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


def excess_of(run: Run, step: PlannedStep) -> float | None:
    """What compression added to a step's loss, in nats a target; None if it was not measured.

    By the same weights and samples: those of its first microbatch, with and without compression.
    """
    reports = [step.ready[peer] for peer in run.computing[-1].peers]
    shadowed = _mean_loss(report.shadowed for report in reports)
    shadows = _mean_loss(report.shadows for report in reports)
    return None if shadowed is None or shadows is None else shadowed - shadows


def _mean_loss(told: Iterable[EvalSum | None]) -> float | None:
    sums = [one for one in told if one is not None]
    num_targets = sum(one.num_targets for one in sums)
    return math.fsum(one.loss_sum for one in sums) / num_targets if num_targets else None


def tokens_for(run: Run, plan: PlanStep, peer: PeerId) -> tuple[SampleId, ...]:
    """Samples whose tokens a peer needs: inputs at the first stage, targets at the last."""
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
    """The run after a step that all stages are ready for, what happened, and what to tell peers.

    The loss is the mean over all target tokens of the batch; gradients are clipped by the norm
    over all stages.
    """
    train, number = run.spec.train, StepNumber(run.committed_steps)
    reports = [step.ready[peer] for peer in run.peers]
    stages = run.computing
    # Replicas of a stage have one gradient, so any of them can tell its norm.
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
            # What was sent of shadows is in that of an evaluation, if there is one.
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
    """Of its schedule, whose peak its owner may have changed."""
    scheduled, submitted = learning_rate_at(run.spec.train, step), run.spec.train.learning_rate
    peak = run.steering.peak_at(step, submitted)
    return scheduled if peak == submitted else scheduled / submitted * peak


def _past_after(run: Run, step: PlannedStep, committed: StepCommitted, commit: CommitStep) -> Past:
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
    """Held-out samples leave none but constants."""
    held_out = step.evaluation if run.spec.keeps_constants else ()
    is_shadow = run.spec.train.is_shadow
    return (*step.microbatches, *(one for one in held_out if not is_shadow(one.samples[0])))


def _measured_after(
    run: Run, step: PlannedStep, committed: StepCommitted, caps: LinkCaps
) -> Measured:
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
                told = (*flops_per_s.pop(peer, ()), share * flops / step.ready[peer].compute_s)
                flops_per_s[peer] = told[-MEASURED_STEPS:]
        for peer, taken in _in_line(newest).items():
            seconds[peer] = (*before.seconds.get(peer, ()), *taken)[-MEASURED_STEPS:]
    return Measured(
        seconds=MappingProxyType(seconds),
        flops_per_s=MappingProxyType(dict(list(flops_per_s.items())[-MAX_MEASURED:])),
        step_seconds=(*before.step_seconds, committed.seconds)[-MEASURED_STEPS:],
        step_targets=(*before.step_targets, num_targets)[-MEASURED_STEPS:],
        buffers=before.buffers,
    )


def _link_s(
    run: Run, step: PlannedStep, index: int, replica: int, caps: tuple[float, float] | None
) -> float:
    """How long a step's microbatches kept a replica's link busy, if it lends a part of that alone.

    What came in is its share of what the stages beside it told that they sent there.
    """
    if caps is None:
        return 0.0
    stages, ready = run.computing, step.ready
    stage = stages[index]

    def sent_by(some: Iterable[Stage]) -> list[Traffic]:
        return [sent for one in some for peer in one.peers for sent in ready[peer].traffic]

    own = ready[stage.peers[replica]].traffic
    ahead, behind = sent_by(stages[:index][-1:]), sent_by(stages[index + 1 :][:1])
    came = sum(t.forward_bytes for t in ahead if t.boundary == stage.layers.start)
    came += sum(t.backward_bytes for t in behind if t.boundary == stage.layers.stop)
    whole = sum(step.share(index, other) for other in range(len(stage.peers)))
    received = came * step.share(index, replica) / max(1, whole)
    up, down = (cap or math.inf for cap in caps)
    return max(sum(t.forward_bytes + t.backward_bytes for t in own) / up, received / down)


def _newest(before: tuple[float, ...], busy_s: float, count: int) -> float | None:
    """Seconds that a microbatch took a replica; None if nothing is known of it."""
    if count:
        return busy_s / count
    # Who was too slow to get any is thought a little faster, until it is tried again.
    return before[-1] * FORGIVEN if before else None


def _in_line(newest: Mapping[PeerId, float | None]) -> dict[PeerId, tuple[float, ...]]:
    """What replicas of a stage told of one step, each within what the others make credible.

    That nobody took longer than the step did was seen to when they told it.
    """
    told = [seconds for seconds in newest.values() if seconds is not None]
    least = statistics.median_high(told) / FASTER_AT_MOST if told else 0.0
    bounded = {peer: max(s, least) if s is not None else 0.0 for peer, s in newest.items()}
    return {peer: (seconds,) if seconds > 0.0 else () for peer, seconds in bounded.items()}


def measured_on(run: Run) -> Measured:
    """What is known of a run's peers at the stages that these begin anew with, maybe others."""
    known, seconds = run.measured.flops_per_s, dict(run.measured.seconds)
    for assignment in run.attempt.assignments:
        flops = stage_flops(run.spec, assignment.layers)
        if assignment.peer_id in known:
            seconds[assignment.peer_id] = tuple(flops / rate for rate in known[assignment.peer_id])
    return replace(run.measured, seconds=MappingProxyType(seconds))


# ---- what peers tell of their buffers, and what becomes of the ledger by it
#
# Only commits are written down, see `commits`. What an inventory or a loss takes out of the ledger
# is told again by every peer that joins a restarted coordinator.

MAX_COUNT = 1 << 48
"""Of one peer; sums over all peers must stay in their fields whatever these tell."""


def with_ledger(run: Run) -> Run:
    """The run with a ledger of its pipeline's boundaries, if these have buffers.

    What is known of other boundaries is of no use.
    """
    train = run.spec.train
    boundaries = tuple(BlockIndex(stage.layers.start) for stage in run.stages[1:])
    has_buffers = any(train.codec(direction).is_delta for direction in Direction)
    entry, ledger = run.spec.entry_of(stage.layers for stage in run.stages), run.past.ledger
    if not boundaries or not (has_buffers or entry):
        return run.with_ledger(None)
    if ledger is None or ledger.boundaries != boundaries:
        ledger = Ledger.empty(boundaries, run.spec.num_kept)
    return run.with_ledger(replace(ledger, entry=entry))


def ends_of(run: Run, peer_id: PeerId) -> dict[BlockIndex, Side]:
    """The boundaries of a peer's stage, and its side of them."""
    last = len(run.stages) - 1
    ends = {}
    for index, stage in enumerate(run.stages):
        if peer_id in stage.peers and index > 0:
            ends[BlockIndex(stage.layers.start)] = Side.DOWNSTREAM
        if peer_id in stage.peers and index < last:
            ends[BlockIndex(stage.layers.stop)] = Side.UPSTREAM
    return ends


def report_refusal(run: Run, peer_id: PeerId, report: StageReady | StepReady) -> Reason | None:
    """Why what a peer of the run tells of its buffers cannot be, if it cannot."""
    held = report.buffers if isinstance(report, StageReady) else report.lost
    boundaries = ends_of(run, peer_id)
    for boundary in (buffers.boundary for buffers in (*held, *report.buffers)):
        if boundary not in boundaries:
            stage = next(one.layers for one in run.stages if peer_id in one.peers)
            kind = ReasonKind.INVALID_BOUNDARY
            return Reason(kind=kind, amount=boundary, layers=(stage,))
    if isinstance(report, StepReady):
        num_counts = task_of(run.spec.train).num_counts
        for told in report.evaluation:
            if len(told.counts) not in (0, num_counts):
                kind, came = ReasonKind.INVALID_COUNTS, len(told.counts)
                return Reason(kind=kind, amount=came, limit=num_counts)
    bound = Bitmap(run.spec.num_kept)
    refusals = (bound.refusal(buffers.samples.bitmap) for buffers in held)
    text = next(filter(None, refusals), None)
    return Reason(kind=ReasonKind.INVALID_SAMPLES, text=text) if text else None


def took_stock(run: Run, peer_id: PeerId, held: Iterable[HeldBuffers]) -> Run:
    """After a peer told all that it has."""
    ledger = run.past.ledger
    if ledger is None:
        return run
    known = {buffers.boundary: buffers.samples for buffers in held}
    return run.with_ledger(ledger.with_inventory(peer_id, known))


def after_report(run: Run, peer_id: PeerId, ready: StepReady) -> Run:
    """After a peer told what it lost, and what its buffers take."""
    ledger = run.past.ledger
    for lost in ready.lost if ledger else ():
        ledger = ledger and ledger.without(peer_id, lost.boundary, lost.samples)
    counts = dict(run.measured.buffers.get(peer_id, {}))
    for new in ready.buffers:
        counts[new.boundary] = _sum(counts.get(new.boundary), new)
    kept = MappingProxyType({**run.measured.buffers, peer_id: MappingProxyType(counts)})
    return replace(run.with_ledger(ledger), measured=replace(run.measured, buffers=kept))


def _sum(before: BufferCounts | None, new: BufferCounts) -> BufferCounts:
    """What is kept as of now, and all that happened until now."""
    if before is not None:
        new = replace(before, samples=0, memory_bytes=0, disk_bytes=0) + new
    return new.at_most(MAX_COUNT)
