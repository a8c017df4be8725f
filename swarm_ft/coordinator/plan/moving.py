"""Repartitions of a run for speed: whether layers move between its stages. Pure.

At intervals, at a commit, a step's time on the present stages is compared with that on others.
These are the stages that `place` would make of the eligible members, other cuts for the present
peers, and stages of fewer or more peers, with layers in proportion to speed. The time saved over
the remaining steps must be well above the cost of the move: a snapshot that is written and read,
and key frames at new boundaries. Each further move waits twice as long as the one before, so that
neither noise nor a peer that reports falsely keeps a run moving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from statistics import median

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import (
    AttemptState,
    Member,
    Repartition,
    RepartitionStats,
    Run,
    Snapshot,
    SwarmState,
)
from swarm_ft.coordinator.plan.allocation import allocate_members, share_of
from swarm_ft.coordinator.plan.cuts import MAX_CUT_BLOCKS, Model, StageSeat
from swarm_ft.coordinator.plan.forecast import Rates, rates_of, step_s
from swarm_ft.coordinator.plan.hosting import end_refusal, refusal
from swarm_ft.coordinator.plan.keepers import can_take_snapshots, is_spreading
from swarm_ft.coordinator.plan.lateness import UNMEASURED_BYTES_S, state_bytes
from swarm_ft.coordinator.plan.membership import with_newcomers
from swarm_ft.coordinator.plan.placement import fits, place, with_replicas
from swarm_ft.coordinator.plan.succession import may_save
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.machines.step_time import forecast_after_change_s
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import Stage, StageAssignment, stages_of
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec

LOOK_S = 30.0
"""Seconds between two comparisons."""
APART_S, MOST_APART_S = 300.0, 3600.0
"""Seconds without a move after the first one; each further move doubles them, up to a maximum."""
MEASURED_AT_LEAST = 3
"""Steps on the present stages before a comparison."""
SAVES_TIMES = 2.0
"""Least ratio of the time that a move saves to its cost."""
FASTER = 0.9
"""Largest ratio of a step's new time to its present time that justifies a move."""
RESTART_S = 5.0
"""Seconds from the end of an attempt until all stages of the next one work, without loading."""
MAX_SEATS = 64
"""Most peers that are considered, the fastest first."""
MAX_NAMED = 4
"""Most moves that a reason names."""


def is_to_look(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether a comparison is due, and all its inputs are known."""
    moves = run.moves
    apart_s = min(MOST_APART_S, APART_S * 2 ** min(moves.count - 1, 16)) if moves.count else 0.0
    is_time = now_s - moves.looked_s >= LOOK_S and now_s - moves.last_s >= apart_s
    is_steady = (
        run.phase is RunPhase.TRAINING
        and run.step is None
        and not run.attempt.learners
        and not run.steering.is_paused
        and not set(state.leaving).intersection(run.peers)
    )
    is_measured = len(run.measured.step_seconds) >= MEASURED_AT_LEAST and all(
        len(run.measured.flops_per_s.get(peer, ())) >= MEASURED_AT_LEAST
        for stage in run.computing
        for peer in stage.peers[:1]
    )
    is_known = is_time and is_steady and is_measured and not run.has_all_steps
    is_known = is_known and not _shares_peers(state, run)
    return state.moves_layers and is_known and _may_be_cut(state, run, now_s)


def _shares_peers(state: SwarmState, run: Run) -> bool:
    """Whether other runs compute on its peers, so that step times show little about stages."""
    hosted = state.hosted
    return any(len(hosted.get(peer, ())) > 1 for peer in run.peers)


def _may_be_cut(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether a snapshot of this step is possible, and other stages can be made of it."""
    # One whole model has its tied ends under one name.
    is_bound = run.spec.train.sync_tied_embeddings and len(run.stages) == 1
    keeps_constants = run.past.ledger is not None and run.past.ledger.entry > 0
    can_be_saved = (
        can_take_snapshots(state, run)
        and may_save(state, run, now_s)
        and not is_spreading(state, run)
        and not run.saving.unlisted
    )
    is_small = 1 < run.spec.model.num_blocks <= MAX_CUT_BLOCKS
    return can_be_saved and is_small and not is_bound and not keeps_constants


def better_stages(state: SwarmState, run: Run, now_s: float) -> Repartition | None:
    """Return the stages on which the run would be much faster, or None.

    Args:
        state: State of the swarm.
        run: Run that just committed a step, see `is_to_look`.
        now_s: Monotonic seconds.
    """
    able = share_of(state, run, now_s)
    if with_newcomers(able, run) is not run:
        return None  # newcomers must first show how fast they are
    rates, took_s = rates_of(state, run), median(run.measured.step_seconds)
    was_s = step_s(run.spec, run.computing, rates, is_first=run.is_in_first_epoch)
    best: Repartition | None = None
    most_s = 0.0
    for assignments in _candidates(able, run, rates, now_s):
        stages = stages_of(assignments)
        if not assignments or stages == run.stages:
            continue
        will_s = step_s(run.spec, stages, rates, is_first=run.is_in_first_epoch)
        after_s = forecast_after_change_s(took_s, was_s, will_s)
        saved_s = _saved_s(run, took_s - after_s) - _key_frames_s(run, stages, rates)
        if after_s <= FASTER * took_s and saved_s > most_s:
            best, most_s = _moving(run, assignments, took_s, after_s), saved_s
    if best is None or most_s < SAVES_TIMES * cost_s(run):
        return None
    return best if _is_its_own(state, run, best, now_s) else None


def _moving(
    run: Run, assignments: tuple[StageAssignment, ...], before_s: float, after_s: float
) -> Repartition:
    step = StepNumber(run.committed_steps)
    return Repartition(step=step, assignments=assignments, before_s=before_s, after_s=after_s)


def cost_s(run: Run) -> float:
    """Return the seconds without steps of a run that moves: a snapshot is written and read."""
    largest = max(state_bytes(run.spec, stage.layers) for stage in run.stages)
    took_s = run.keeping.took_s or largest / UNMEASURED_BYTES_S
    return 2 * took_s + RESTART_S


def is_possible(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether the repartition that a run waits for is still possible."""
    moving = run.moving
    if moving is None or run.steering.is_paused or run.committed_steps != moving.step:
        return False
    peers = {assignment.peer_id for assignment in moving.assignments}
    if not peers.union(run.peers).isdisjoint(state.leaving):
        return False
    able = share_of(state, run, now_s)
    is_saved = run.past.saved is not None
    return peers <= able.members.keys() and (is_saved or may_save(state, run, now_s))


def awaits_move(run: Run) -> bool:
    """Whether the run waits between two steps for the snapshot of its repartition."""
    return run.moving is not None and not run.moving.has_begun and run.step is None


def with_begun_move(run: Run, now_s: float) -> Run:
    """Return the run that gives up its stages; step times on these no longer count."""
    moving = run.moving and replace(run.moving, has_begun=True)
    moves = RepartitionStats(count=run.moves.count + 1, last_s=now_s, looked_s=now_s)
    measured = replace(run.measured, step_seconds=(), step_targets=())
    return replace(run, moving=moving, moves=moves, measured=measured)


def moved_reason(run: Run, moving: Repartition) -> Reason:
    """Return the reason for moved layers, with both hosts and the step times."""
    before, after = _hosts(run.stages), _hosts(stages_of(moving.assignments))
    changes = [
        (tuple(p for p in old if p not in new), tuple(p for p in new if p not in old))
        for old, new in zip(before, after, strict=True)
    ]
    parts, start = [], 0
    for (left_peers, new_peers), group in groupby(changes):
        stop = start + sum(1 for _ in group)
        if left_peers or new_peers:
            kind, layers = ReasonKind.LAYERS_MOVED, (LayerRange(start, stop),)
            parts.append(Reason(kind=kind, layers=layers, peers=left_peers, others=new_peers))
        start = stop
    return Reason(
        kind=ReasonKind.MOVED,
        parts=tuple(parts[:MAX_NAMED]),
        num_more=len(parts[MAX_NAMED:]),
        amount=moving.after_s,
        limit=moving.before_s,
    )


def _hosts(stages: Sequence[Stage]) -> list[tuple[PeerId, ...]]:
    """Return the peers of each block."""
    return [stage.peers for stage in stages for _ in range(len(stage.layers))]


# ---- what a move saves


def _saved_s(run: Run, each_s: float) -> float:
    return (run.spec.train.num_steps - run.committed_steps) * each_s


def _key_frames_s(run: Run, stages: Sequence[Stage], rates: Rates) -> float:
    """Return the additional seconds of steps whose samples are new only to the new stages."""
    train = run.spec.train
    left, epoch = train.num_steps - run.committed_steps, train.steps_per_epoch
    anew = min(left, epoch) - max(0, min(left, epoch - run.committed_steps))
    first_s, later_s = (step_s(run.spec, stages, rates, is_first=one) for one in (True, False))
    return anew * (first_s - later_s)


def _is_its_own(state: SwarmState, run: Run, moving: Repartition, now_s: float) -> bool:
    """Whether the run would get those peers after it gave up its own; other runs may wait."""
    if run.past.last_commit is None:
        return False
    saved = Snapshot(last_commit=run.past.last_commit, sent=run.past.sent)
    again = replace(
        run,
        past=replace(run.past, snapshots=(saved,)).rolled_back,
        moving=replace(moving, has_begun=True),
        attempt=AttemptState(number=run.attempt.number),
    )
    peers = {assignment.peer_id for assignment in moving.assignments}
    return peers <= allocate_members(state.with_run(again), now_s).members[run.run_id]


# ---- possible stages


def _candidates(
    able: SwarmState, run: Run, rates: Rates, now_s: float
) -> Iterator[tuple[StageAssignment, ...]]:
    spec = run.spec
    kept_out = able.result_keepers
    members = [member for peer, member in able.members.items() if peer not in kept_out]
    yield place(spec, members, now_s).assignments
    carriers = [member for member in members if not member.grant.replica_only]
    if any(member.hello.layers is not None for member in carriers):
        return  # a member that names its layers fixes the cut
    known = {member.hello.peer_id: member for member in carriers}
    model = _model(spec)
    groups = [[known[p] for p in stage.peers if p in known] for stage in run.computing]
    if all(groups) and any(len(group) > 1 for group in groups):
        yield _cut(spec, model, groups, carriers, rates)
    row = _in_a_row(run, carriers)
    fastest = sorted(row, key=lambda member: -rates.computes(member.hello.peer_id))
    for count in range(1, min(len(row), spec.model.num_blocks, MAX_SEATS) + 1):
        chosen = [member for member in row if member in fastest[:count]]
        yield _cut(spec, model, [[member] for member in chosen], carriers, rates)


@lru_cache(maxsize=8)
def _model(spec: RunSpec) -> Model:
    return Model(spec)


def _in_a_row(run: Run, carriers: Sequence[Member]) -> list[Member]:
    """Return the members in their present order, new ones before the last, which sees labels."""
    seats = {peer: seat for seat, peer in enumerate(run.peers)}
    last = len(seats) - 1.5
    return sorted(carriers, key=lambda member: seats.get(member.hello.peer_id, last))


def _cut(
    spec: RunSpec,
    model: Model,
    groups: Sequence[Sequence[Member]],
    carriers: Sequence[Member],
    rates: Rates,
) -> tuple[StageAssignment, ...]:
    """Return a stage for each group, with layers in proportion to its speed; empty if impossible.

    Members without a group become replicas where they help most, as newcomers do.
    """
    ranges = model.cut([_seat(spec, group, rates) for group in groups])
    hosts = [(m, layers) for layers, group in zip(ranges, groups, strict=False) for m in group]
    if not all(
        fits(spec, layers, member.hello) and not refusal(spec, member, layers)
        for member, layers in hosts
    ):
        return ()
    first = tuple(StageAssignment(peer_id=m.hello.peer_id, layers=layers) for m, layers in hosts)
    return with_replicas(spec, first, carriers)


def _seat(spec: RunSpec, group: Sequence[Member], rates: Rates) -> StageSeat:
    grants = [member.grant.layers or spec.model.layers for member in group]
    start, stop = max(one.start for one in grants), min(one.stop for one in grants)
    return StageSeat(
        flops_per_s=sum(rates.computes(member.hello.peer_id) for member in group),
        memory_bytes=min(member.hello.memory_bytes for member in group),
        inside=LayerRange(start, stop) if start < stop else LayerRange(0, 1),
        may_be_end=not any(end_refusal(spec, member) for member in group),
    )
