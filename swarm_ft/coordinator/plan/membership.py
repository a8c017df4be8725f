"""Members of runs: eligibility, patience, learners, and reasons. Pure.

Several functions take `able`, or a `state`, with only the members that are eligible for a run. A
member on probation (`replica_only`) is only an extra replica: each run can continue without it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from types import MappingProxyType

from swarm_ft.coordinator.facts.connectivity import Connectivity
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind, several
from swarm_ft.coordinator.facts.state import Member, Run, SwarmState
from swarm_ft.coordinator.plan.hosting import refusal
from swarm_ft.coordinator.plan.offers import Offers
from swarm_ft.coordinator.plan.placement import (
    SETTLE_S,
    Placement,
    first_hosts,
    first_hosts_on,
    fits,
    fits_nobody,
    grown,
    surely_fits,
)
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    HeldStage,
    Learner,
    PeerHello,
    Stage,
    StageAssignment,
)
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange

GRACE_S = 30.0
"""Most seconds that a run waits for a disconnected peer with weights that no other peer has."""
SHORT_GRACE_S = 5.0
"""Least seconds of that wait: a healthy peer is back in a second or two."""
GATHER_S = 3.0
"""Seconds that a restarted coordinator waits for peers that replicas could replace."""
SILENT_S = 8.0
"""Seconds without a message after which a peer is dismissed, whatever its connection looks like."""


def eligible_members(state: SwarmState, run: Run, now_s: float) -> SwarmState:
    """Return the state with only those members that are eligible for the run now.

    These members are not:

    - misfits, and suspended peers;
    - peers that reported inf or NaN in the open step, as long as others can do it without them;
    - leavers, except the last ones with a stage's state.
    """
    able = {
        peer
        for peer in state.members
        if not (peer in run.misfits or is_suspended_for(state, run, peer, now_s))
    }
    doubters = {p for p, step in run.doubts.items() if step >= run.committed_steps} & able
    if doubters:
        able -= replaceable(state.with_members(able), run, doubters)
    return state.with_members(able - _dispensable_leavers(state, run, able))


def is_suspended_for(state: SwarmState, run: Run, peer: PeerId, now_s: float) -> bool:
    """Whether a peer is suspended, from all runs or from this one."""
    return state.is_suspended(peer, now_s) or run.has_suspended(peer, now_s)


def replaceable(able: SwarmState, run: Run, peers: Collection[PeerId]) -> frozenset[PeerId]:
    """Return those of `peers` without which the run can do its open step.

    A peer's replicas can do its part. If some peer has none, other members may be able to host the
    whole run from the newest snapshot, or from the beginning.

    Args:
        able: State with only the members that are eligible for the run.
        run: Run with an open step.
        peers: Peers to replace.
    """
    have_replica = {
        peer
        for stage in run.stages
        if _has_other_replica(able, run, stage, peers)
        for peer in stage.peers
        if peer in peers
    }
    others = able.members.keys() - set(peers)
    if have_replica >= set(peers) or not others:
        return frozenset(have_replica)
    # At an infinite time the placement does not wait for members that may follow.
    can_host_all = find_placement(able.with_members(others), run, math.inf).assignments
    return frozenset(peers if can_host_all else have_replica)


def _has_other_replica(able: SwarmState, run: Run, stage: Stage, but: Collection[PeerId]) -> bool:
    others = [peer for peer in stage.peers if peer not in but]
    return any(able.may_host_alone(p) and has_stage(able, run, p, stage.layers) for p in others)


def _dispensable_leavers(state: SwarmState, run: Run, able: Collection[PeerId]) -> set[PeerId]:
    """Return the leavers whose loss would cost the run nothing.

    The others are the last ones with the state of a stage, if no snapshot has that state.
    """
    leaving = set(state.leaving)
    if not leaving or not run.committed_steps or run.past.saved is not None:
        return leaving
    needed: set[PeerId] = set()
    for stage in run.stages:
        with_state = {
            p for p in stage.peers if p in able and has_stage(state, run, p, stage.layers)
        }
        if not any(state.may_host_alone(peer) for peer in with_state - leaving):
            needed |= with_state & leaving
    return leaving - needed


def misfit_of_all(state: SwarmState, run: Run) -> Reason | None:
    """Return why no member can ever host the run, by the first misfit; None if one may.

    At least one member has to have reported that it cannot. Members with fixed layers that the run
    cannot use do not count, nor do those on probation: their reports end no run.
    """
    if run.misfits.keys().isdisjoint(state.members):
        return None
    misfits: list[PeerId] = []
    for peer, member in state.members.items():
        if member.grant.replica_only:
            continue
        if peer in run.misfits:
            misfits.append(peer)
        elif layers_misfit(state, run, member.hello) is None or peer in state.result_keepers:
            return None
    return replace(run.misfits[misfits[0]], peers=(misfits[0],)) if misfits else None


def reasons_to_idle(state: SwarmState, now_s: float) -> Mapping[PeerId, Reason | None]:
    """Return why each member has no work, see `why_idle`; None where it may have some.

    Members that differ only in name have the same answer, which is computed once.
    """
    going, found = state.going_runs, dict[PeerId, Reason | None]()
    known_by_name = state.result_keepers.union(
        *(run.peers for run in going),
        *(run.misfits for run in going),
        *(run.conducts for run in going),
        *(run.spec.trusted_with_ends for run in going),
    )
    by_offer: dict[tuple[LayerRange | None, Grant], Reason | None] = {}
    for peer, member in state.members.items():
        if peer in known_by_name or member.leaving is not None or state.is_suspended(peer, now_s):
            found[peer] = why_idle(state, state.runs_of(peer) or going, member, now_s)
            continue
        offer = (member.hello.layers, member.grant)
        if offer not in by_offer:
            by_offer[offer] = why_idle(state, going, member, now_s)
        found[peer] = by_offer[offer]
    return found


def why_idle(state: SwarmState, runs: Sequence[Run], member: Member, now_s: float) -> Reason | None:
    """Return why a member has no work, if its volunteer can do something about it; else None.

    There is no reason if one of the runs may use the member. Otherwise the reason is that of the
    first run, and names it.

    Args:
        state: State of the swarm.
        runs: Runs that it works for, or all that it may work for.
        member: Member without work.
        now_s: Monotonic seconds.
    """
    if member.leaving is not None:
        kind = ReasonKind.IS_PAUSED if member.leaving.stays else ReasonKind.IS_LEAVING
        return Reason(kind=kind, text=member.leaving.reason)
    if state.is_suspended(member.hello.peer_id, now_s):
        return state.reputation(member.hello.peer_id).suspension
    reasons = [_why_not_for(state, run, member, now_s) for run in runs]
    is_useless_to_all = bool(reasons) and all(reasons)
    return reasons[0] if is_useless_to_all else None


def suspension_of(state: SwarmState, run: Run, peer: PeerId, now_s: float) -> Reason:
    """Return the reason for which a peer is suspended, from all runs or from this one."""
    if state.is_suspended(peer, now_s):
        return state.reputation(peer).suspension
    suspension = run.conduct(peer).standing.suspension
    return replace(suspension, kind=ReasonKind.SUSPENDED_FROM_RUN, run_id=run.run_id)


def _why_not_for(state: SwarmState, run: Run, member: Member, now_s: float) -> Reason | None:
    peer_id = member.hello.peer_id
    if peer_id in run.misfits:
        return run.misfits[peer_id].of(run.run_id)
    if run.has_suspended(peer_id, now_s):
        return suspension_of(state, run, peer_id, now_s)
    return layers_misfit(state, run, member.hello) or _not_granted(run, member)


def _not_granted(run: Run, member: Member) -> Reason | None:
    """Return why a member may host none of the run's stages; None if it may host one.

    A member that offers fixed layers could host only these.
    """
    if member.hello.peer_id in run.peers:
        return None
    own_layers = member.hello.layers
    candidates = [own_layers] if own_layers else [stage.layers for stage in run.stages]
    refused: dict[Reason, list[LayerRange]] = {}
    for layers in candidates:
        why = refusal(run.spec, member, layers)
        if why is None:
            return None
        refused.setdefault(why, []).append(layers)
    kind = ReasonKind.REFUSED_LAYERS
    parts = tuple(
        Reason(kind=kind, layers=tuple(ranges), parts=(why,)) for why, ranges in refused.items()
    )
    return Reason(kind=ReasonKind.NOT_GRANTED, run_id=run.run_id, parts=parts) if parts else None


def without_misfit(state: SwarmState, peer: PeerId) -> SwarmState:
    """Return the state in which this peer is no misfit: it may have changed."""
    for run in state.going_runs:
        if peer in run.misfits:
            misfits = {name: why for name, why in run.misfits.items() if name != peer}
            state = state.with_run(replace(run, misfits=MappingProxyType(misfits)))
    return state


def layers_misfit(state: SwarmState, run: Run, hello: PeerHello) -> Reason | None:
    """Return why the fixed layers of a peer are useless to the run; None if they are not.

    Peers of the run, and peers that keep the result of an earlier one, are exempt.
    """
    layers, model = hello.layers, run.spec.model
    if layers is None:
        return None
    stages = tuple(stage.layers for stage in run.stages)
    is_outside = layers.stop > model.num_blocks
    if not is_outside and (not stages or layers in stages):
        return None
    if hello.peer_id in run.peers or hello.peer_id in state.result_keepers:
        return None
    if is_outside:
        both = (layers, model.layers)
        return Reason(kind=ReasonKind.OUTSIDE_MODEL, run_id=run.run_id, layers=both)
    return Reason(kind=ReasonKind.NO_SUCH_STAGE, run_id=run.run_id, layers=(layers, *stages))


def is_wanted(state: SwarmState, peer_id: PeerId, held: HeldStage) -> bool:
    """Whether the run, or its client, can use the stage that this peer holds."""
    run = state.runs.get(held.run_id)
    if run is None or run.phase > RunPhase.FINISHED or not belongs_to(run, held):
        return False
    is_current = not run.phase.is_over and run.past.holds.get(peer_id) == run.committed_steps
    return is_current or peer_id in run.peers


def loss_of(state: SwarmState, run: Run, peer_id: PeerId, cause: Reason) -> Reason:
    """Return the reason for a lost peer, and the consequence if it is certain."""
    stage = next(stage for stage in run.stages if peer_id in stage.peers)
    connected = [peer for peer in stage.peers if peer in state.members and peer != peer_id]
    others = tuple(peer for peer in connected if peer not in run.listeners)
    parts = [cause]
    if peer_id in run.listeners:
        parts.append(Reason(kind=ReasonKind.WAS_JOINING))
    elif any(map(state.may_host_alone, others)):
        parts.append(Reason(kind=ReasonKind.TAKEN_OVER, others=others))
    elif others:
        parts.append(Reason(kind=ReasonKind.NO_CARRIER, others=others))
    return Reason(
        kind=ReasonKind.PEER_LOST,
        peers=(peer_id,),
        layers=(stage.layers,),
        parts=tuple(parts),
    )


def lost_stages(able: SwarmState, run: Run) -> tuple[Stage, ...]:
    """Return stages whose weights no eligible peer has, apart from peers on probation.

    Args:
        able: State with only the members that are eligible for the run.
        run: Run that is to continue.
    """
    return tuple(
        stage
        for stage in run.stages
        if not any(
            able.may_host_alone(p) and has_stage(able, run, p, stage.layers) for p in stage.peers
        )
    )


def weights_lost(state: SwarmState, run: Run, stages: Collection[Stage], now_s: float) -> Reason:
    """Return the reason for lost weights, with the fate of each peer that had them."""
    return Reason(
        kind=ReasonKind.WEIGHTS_LOST,
        layers=tuple(stage.layers for stage in stages),
        parts=tuple(
            Reason(kind=_absence(state, run, peer, now_s), peers=(peer,))
            for stage in stages
            for peer in stage.peers
        ),
    )


def _absence(state: SwarmState, run: Run, peer: PeerId, now_s: float) -> ReasonKind:
    if peer in run.misfits:
        return ReasonKind.CANNOT_HOST
    if is_suspended_for(state, run, peer, now_s):
        return ReasonKind.SUSPENDED
    if peer in state.members:
        return ReasonKind.STATE_LOST if state.may_host_alone(peer) else ReasonKind.NOT_ALONE
    is_sent_or_left = run.attempt.away_since_s.get(peer) == -math.inf
    return ReasonKind.PEER_LEFT if is_sent_or_left else ReasonKind.PEER_DISCONNECTED


def remedy_for(state: SwarmState, run: Run, lost: Collection[LayerRange]) -> Reason:
    """Return the remedy that would have kept the steps of a run with these lost layers."""
    train = run.spec.train
    if not train.takes_snapshots and not state.num_keepers:
        return Reason(kind=ReasonKind.REMEDY_SNAPSHOTS, layers=tuple(lost))
    save_steps = train.save_steps if train.takes_snapshots else None
    return Reason(kind=ReasonKind.REMEDY_SAVE_STEPS, layers=tuple(lost), amount=save_steps)


def holds_last_commit(run: Run, held: HeldStage) -> bool:
    """Whether the weights are those of the run's last commit, and not of a void one."""
    if not belongs_to(run, held) or held.committed_steps != run.committed_steps:
        return False
    last_commit = run.past.last_commit
    return last_commit is None or held.last_attempt == last_commit.attempt


def may_hold_last_commit(run: Run, peer_id: PeerId) -> bool:
    """Whether a peer's claim to hold the last commit is credible.

    It is if the peer took part in that commit, or copied the state since.
    """
    past = run.past
    is_known = peer_id in past.committers or past.holds.get(peer_id) == run.committed_steps
    return is_known or not run.committed_steps


def belongs_to(run: Run, held: HeldStage) -> bool:
    """Whether a held stage belongs to this run, by the same RunSpec."""
    return held.run_id == run.run_id and held.spec_digest == run.spec.digest()


def missed_last_commit(run: Run, held: HeldStage, peer_id: PeerId) -> bool:
    """Whether the peer lacks nothing but the last commit, in which it took part."""
    is_behind = belongs_to(run, held) and held.committed_steps == run.committed_steps - 1
    return is_behind and run.past.last_commit is not None and peer_id in run.past.committers


def with_exports_of(state: SwarmState, member: Member) -> SwarmState:
    """Return the state with the results that a joining member holds.

    A member on probation is not believed: its file may have changed since others confirmed it.
    """
    hello = member.hello
    for run in state.runs.values():
        stage = None if member.grant.replica_only else hello.held_of(run.run_id)
        if hello.peer_id in run.peers:
            exported = {
                peer: file for peer, file in run.past.exported.items() if peer != hello.peer_id
            }
            if stage is not None and stage.exported and holds_last_commit(run, stage):
                exported[hello.peer_id] = stage.exported
            past = replace(run.past, exported=MappingProxyType(exported))
            state = state.with_run(replace(run, past=past))
    return state


def lost_parts(state: SwarmState, run: Run, now_s: float) -> tuple[LayerRange, ...]:
    """Return the stages of a finished run whose result is lost.

    All peers with a stage's result are away, and have been for longer than `GRACE_S`.
    """
    return tuple(
        stage.layers
        for stage in run.stages
        if not any(
            peer in state.members or _may_return(state, run, peer, now_s, GRACE_S)
            for peer in stage.peers
            if peer in run.past.exported
        )
    )


def find_placement(state: SwarmState, run: Run, now_s: float) -> Placement:
    """Return the placement that the run would get if it rolled back now.

    It uses the stages of the run's snapshot, whose buffers continue, or those of its repartition.
    If no members can host these, the layers are divided into new stages, and each stage loads its
    layers from the snapshot.
    """
    return place_on(offers_in(state), run, now_s)


def offers_in(state: SwarmState) -> Offers:
    """Return the offers of all members but those that keep a result and host one run at a time."""
    full = {peer for peer in state.result_keepers if not hosts_several_runs(state, peer)}
    if not full:
        return Offers(state.members.values())
    return Offers(member for peer, member in state.members.items() if peer not in full)


def offers_to_begin(state: SwarmState, now_s: float) -> Offers:
    """Return the offers of members that neither leave nor are suspended, for runs without peers.

    Misfits of single runs are included.
    """
    able = {
        peer
        for peer, member in state.members.items()
        if member.leaving is None and not state.is_suspended(peer, now_s)
    }
    return offers_in(state.with_members(able))


def place_on(offers: Offers, run: Run, now_s: float) -> Placement:
    """Return the placement of a run on members that are free for it."""
    return grown(run.spec, place_first_hosts(offers, run, now_s), offers)


def place_first_hosts(offers: Offers, run: Run, now_s: float) -> Placement:
    """Return the placement of a run with one member for each stage.

    A run with a snapshot keeps its stages, or gets those of its repartition. If these find no
    hosts, its layers are divided into new stages.
    """
    if run.past.snapshot is None:
        return first_hosts(run.spec, offers, now_s)
    moved = _moved_to(offers, run)
    if moved:
        return Placement(moved, is_by_speed=True)
    cuts = [stage.layers for stage in run.past.snapshot.stages]
    as_before = first_hosts_on(cuts, run.spec, offers, now_s)
    # A snapshot of one stage has the tied embeddings once; several stages need them twice.
    cannot_be_cut = run.spec.train.sync_tied_embeddings and len(cuts) == 1
    if as_before.assignments or as_before.is_gathering or cannot_be_cut:
        return as_before
    return first_hosts(run.spec, offers, now_s)


def could_begin(offers: Offers, run: Run, now_s: float) -> bool:
    """Whether `place_first_hosts` finds hosts for all blocks."""
    if surely_begins(offers, run, now_s):
        return True
    if run.past.snapshot is None and fits_nobody(run.spec, offers):
        return False
    return bool(place_first_hosts(offers, run, now_s).assignments)


def surely_begins(offers: Offers, run: Run, now_s: float) -> bool:
    """Whether the offered memory suffices so clearly that `place_first_hosts` need not run."""
    has_settled = now_s - offers.newest_auto_s >= SETTLE_S  # no member joined just now
    return run.past.snapshot is None and has_settled and surely_fits(run.spec, offers)


def hosts_several_runs(state: SwarmState, peer: PeerId) -> bool:
    """Whether a member hosts stages of several runs, if its memory allows."""
    return peer in state.members and state.members[peer].hello.max_beside > 0


def moved_stages(state: SwarmState, run: Run) -> tuple[StageAssignment, ...]:
    """Return the new stages of a repartition; none if one of their peers is gone."""
    return _moved_to(offers_in(state), run) if run.moving is not None else ()


def _moved_to(offers: Offers, run: Run) -> tuple[StageAssignment, ...]:
    moving, snapshot = run.moving, run.past.snapshot
    if moving is None or not moving.has_begun or snapshot is None or snapshot.step != moving.step:
        return ()
    hosts = moving.assignments
    return hosts if all(_may_host(offers, run, host) for host in hosts) else ()


def _may_host(offers: Offers, run: Run, host: StageAssignment) -> bool:
    member = offers.get(host.peer_id)
    if member is None:
        return False
    hello = member.hello
    has_room = hello.layers == host.layers or (
        hello.layers is None and fits(run.spec, host.layers, hello)
    )
    return has_room and not refusal(run.spec, member, host.layers)


def patience_s(state: SwarmState, run: Run, now_s: float) -> float:
    """Return the seconds that a run waits for a stage's last peer while it is away.

    Waiting costs time; a rollback costs the steps since the newest snapshot, and makes sense only
    where members could host all layers now. Whether the peer comes back is unknown, so the run
    waits as long as the rollback would cost: in total never more than twice the cost of the better
    choice (the ski rental problem).
    """
    if not find_placement(state, run, now_s).assignments:
        return GRACE_S
    redone_steps = run.committed_steps - run.past.rolled_back.committed_steps
    redone_s = redone_steps * median(run.measured.step_seconds or (0.0,))
    return min(GRACE_S, max(SHORT_GRACE_S, redone_s))


def with_survivors(state: SwarmState, run: Run, now_s: float, grace_s: float) -> Run | None:
    """Return the run without absent peers that replicas can replace.

    An absent peer stays if it may come back and no replica of its stage is connected, or while a
    restarted coordinator gathers peers. Listeners stay, and nobody waits for them. The result is
    None if a stage has no peer left: its weights are lost, or the run waited long enough. Replicas
    on probation replace nobody: a stage with only those has no peer left.

    Args:
        state: State with only the members that are eligible for the run.
        run: Run as its last attempt left it.
        now_s: Monotonic seconds.
        grace_s: Seconds in which an absent peer may come back, see `patience_s`.
    """
    assignments: list[StageAssignment] = []
    for stage in run.stages:
        present = {peer for peer in stage.peers if has_stage(state, run, peer, stage.layers)}
        suffice_alone = {peer for peer in present if state.may_host_alone(peer)}
        expected: set[PeerId] = set()
        if not suffice_alone or now_s < run.gather_until_s:
            expected = {p for p in stage.peers if _may_return(state, run, p, now_s, grace_s)}
        if not suffice_alone | expected:
            return None
        listening = {peer for peer in run.listeners if peer in state.members}
        staying = present | expected | listening
        assigned = (a for a in run.attempt.assignments if a.layers == stage.layers)
        assignments += [a for a in assigned if a.peer_id in staying]
    is_same = tuple(assignments) == run.attempt.assignments
    return run if is_same else run.with_assignments(assignments)


def has_stage(state: SwarmState, run: Run, peer: PeerId, layers: LayerRange) -> bool:
    """Whether a peer is connected and has the stage as of the last commit.

    Before the first commit: whether it may host the stage.
    """
    member = state.members.get(peer)
    if member is None or member.hello.layers not in (None, layers):
        return False
    if refusal(run.spec, member, layers):
        return False
    return not run.committed_steps or run.past.holds.get(peer) == run.committed_steps


def _may_return(state: SwarmState, run: Run, peer: PeerId, now_s: float, grace_s: float) -> bool:
    if peer in state.members or peer in run.listeners:
        return False
    return now_s - run.attempt.away_since_s.get(peer, -math.inf) < grace_s


def with_newcomers(state: SwarmState, run: Run) -> Run:
    """Return the run with members that can join its stages, each next to the stage's replicas."""
    unavailable = state.result_keepers.union(run.peers)
    newcomers = {peer: member for peer, member in state.members.items() if peer not in unavailable}
    leaving = frozenset(state.leaving)
    bypassed = {stage.layers for stage in bypassed_stages(run)} if newcomers else set()
    for peer, member in newcomers.items():
        may_join = not member.grant.replica_only or can_listen(run)
        layers = _layers_for(run, member, state.ways, bypassed, leaving) if may_join else None
        if layers is not None:
            assignments = list(run.attempt.assignments)
            last = max(i for i, a in enumerate(assignments) if a.layers == layers)
            assignments.insert(last + 1, StageAssignment(peer_id=peer, layers=layers))
            run = run.with_assignments(assignments)
    return run


def bypassed_stages(run: Run) -> tuple[Stage, ...]:
    """Return the first stages, if no sample passes them any more.

    That is so once the stage behind them (`Ledger.entry`) has cached its input for every sample.
    """
    ledger, stages = run.past.ledger, run.stages
    if ledger is None or not ledger.entry or run.is_in_first_epoch:
        return ()
    keepers = stages[ledger.entry].peers
    has_all_inputs = ledger.keeps_all(keepers, run.spec.train.num_samples)
    return stages[: ledger.entry] if has_all_inputs else ()


def without_spare_replicas(state: SwarmState, run: Run) -> Run:
    """Return the run without replicas of bypassed stages, which may host other layers.

    One replica of each stage stays: a sample whose cached input is lost passes it again.
    """
    entry = run.past.ledger.entry if run.past.ledger else 0
    spare = {peer for stage in run.stages[:entry] for peer in _spare_replicas(state, run, stage)}
    if not spare or not bypassed_stages(run):
        return run
    for peer in spare:
        run = without_state(run, peer)
    assignments = [a for a in run.attempt.assignments if a.peer_id not in spare]
    return run.with_assignments(assignments)


def _spare_replicas(state: SwarmState, run: Run, stage: Stage) -> list[PeerId]:
    """Return the replicas that a stage can do without, and that may host other layers.

    One stays, if possible one that offers these layers alone.
    """
    present = [p for p in stage.peers if has_stage(state, run, p, stage.layers)]
    suffice_alone = [p for p in present if state.may_host_alone(p)]
    have_fixed_layers = [p for p in suffice_alone if state.members[p].hello.layers is not None]
    if not suffice_alone:
        return []
    stays = (have_fixed_layers or suffice_alone)[0]
    return [p for p in present if p != stays and state.members[p].hello.layers is None]


def can_listen(run: Run) -> bool:
    """Whether a newcomer would copy its state while the others train, without a wait."""
    is_training = bool(run.committed_steps) and run.phase is not RunPhase.LOADING
    return is_training and not run.spec.shared_values


def learners_of(state: SwarmState, run: Run) -> Iterator[Learner]:
    """Yield the run's peers that must copy their stage's state from its other replicas.

    A listener continues its copy as long as a source of that state is left. Replicas on probation
    are no sources: their state is not trusted.
    """
    before = {learner.peer_id: learner for learner in run.attempt.learners}
    for stage in run.stages:
        able = tuple(p for p in stage.peers if has_stage(state, run, p, stage.layers))
        sources = tuple(filter(state.may_host_alone, able))
        for peer in stage.peers:
            if peer not in able:
                yield _learner(run, peer, sources, before.get(peer))


def _learner(run: Run, peer: PeerId, able: tuple[PeerId, ...], before: Learner | None) -> Learner:
    sources = tuple(source for source in before.sources if source in able) if before else ()
    if before and sources and peer in run.listeners:
        return replace(before, sources=sources)
    return Learner(peer_id=peer, step=StepNumber(run.committed_steps), sources=able)


def knows_of(run: Run, peer: PeerId) -> bool:
    """Whether a run has, or had, anything to do with a peer."""
    attempt = run.attempt
    is_known = peer in run.peers or peer in run.past.holds or peer in attempt.caught_up
    return (
        is_known or peer in attempt.away_since_s or any(t.peer_id == peer for t in attempt.learners)
    )


def without_state(run: Run, peer: PeerId) -> Run:
    """Return the run without any knowledge of this peer's state or copy."""
    run = run.with_holds({name: n for name, n in run.past.holds.items() if name != peer})
    learners = tuple(t for t in run.attempt.learners if t.peer_id != peer)
    caught_up = run.attempt.caught_up - {peer}
    return replace(run, attempt=replace(run.attempt, learners=learners, caught_up=caught_up))


def with_caught_up(run: Run) -> Run:
    """Return the run in which learners that have caught up are ordinary replicas."""
    caught_up = run.attempt.caught_up
    if not caught_up:
        return run
    run = run.with_holds({**run.past.holds, **dict.fromkeys(caught_up, run.committed_steps)})
    learners = tuple(t for t in run.attempt.learners if t.peer_id not in caught_up)
    return replace(run, attempt=replace(run.attempt, learners=learners, caught_up=frozenset()))


def joining_of(run: Run) -> Reason | None:
    """Return the reason that names learners while the others train, or None."""
    listeners = run.listeners
    return several(
        Reason(kind=ReasonKind.JOINING_STAGE, peers=(a.peer_id,), layers=(a.layers,))
        for a in run.attempt.assignments
        if a.peer_id in listeners
    )


def caught_up_of(run: Run) -> Reason | None:
    """Return the reason that names peers that have caught up, or None."""
    kind, step = ReasonKind.CAUGHT_UP, run.committed_steps
    return several(
        Reason(kind=kind, peers=(a.peer_id,), layers=(a.layers,), step=step)
        for a in run.attempt.assignments
        if a.peer_id in run.attempt.caught_up
    )


def _layers_for(
    run: Run,
    member: Member,
    ways: Connectivity,
    bypassed: Collection[LayerRange],
    leaving: frozenset[PeerId],
) -> LayerRange | None:
    """Return the stage of a newcomer, or None if it can host none.

    1. A member that offers fixed layers gets their stage.
    2. A member that holds a stage's state gets that stage, unless the stage is bypassed, or all
       peers of some stage are leaving.
    3. Any other member gets a stage that all its peers are leaving, or else the stage with the most
       work for each remaining replica. Among equals it gets a stage whose peers and neighbours it
       reaches directly.
    """
    hello = member.hello
    held = hello.held_of(run.run_id)
    held_layers = held.layers if held else None
    is_needed = any(leaving.issuperset(stage.peers) for stage in run.stages)
    fixed = hello.layers or (None if held_layers in bypassed or is_needed else held_layers)
    matching = [stage for stage in run.stages if fixed in (None, stage.layers)]
    fitting = [s for s in matching if fixed or fits(run.spec, s.layers, hello)]
    allowed = [s for s in fitting if not refusal(run.spec, member, s.layers)]

    def help_at(stage: Stage) -> tuple[float, float]:
        index = run.stages.index(stage)
        nearby = [p for s in run.stages[max(0, index - 1) : index + 2] for p in s.peers]
        relayed = mean(ways.relayed_percent(hello.peer_id, peer) for peer in nearby)
        work = 0.0 if stage.layers in bypassed else run.spec.work(stage.layers)
        num_staying = sum(peer not in leaving for peer in stage.peers)
        return work / num_staying if num_staying else math.inf, -relayed

    best = max(allowed, key=help_at, default=None)
    return best.layers if best else None
