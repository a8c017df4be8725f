"""Who keeps what of a run's snapshots, where these lie with the peers themselves. Pure.

Each stage of a snapshot lies with the peer that saved it, and with some that do not host it, so
that as many machines may die at once. They get it encrypted, and no key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from swarm_ft.coordinator.facts.state import Member, Run, Snapshot, SwarmState
from swarm_ft.coordinator.plan.lateness import UNMEASURED_BYTES_S, state_bytes
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import SavedStage
from swarm_ft.protocol.messages.shard import KeptShard
from swarm_ft.protocol.spec.run_spec import SaveStrategy

KEEPERS_S = 1800.0
"""How long a run waits, at most, for peers that alone keep what it is to begin with."""
GRACE_S = 30.0
"""And at least; so too before others are asked to keep what they do."""
SHARE = 0.1
"""Of the time, and so of links, that snapshots may take which nobody asked for."""
MIN_EVERY_S = 60.0
"""How often such are taken at most: small states cost next to nothing."""


# ---- who has what


def wanted_stages(run: Run) -> Iterator[tuple[Snapshot, SavedStage]]:
    """Stages of all snapshots that are to be kept: those that are whole, and the one under way."""
    if run.phase <= RunPhase.FINISHED:
        for snapshot in (*run.past.snapshots, *([run.saving.asked] if run.saving.asked else ())):
            for stage in snapshot.stages:
                yield snapshot, stage


def holders(state: SwarmState, stage: SavedStage) -> tuple[PeerId, ...]:
    """Members that have a stage of a snapshot, and can give it."""
    return tuple(peer for peer in stage.keepers if peer in state.members)


def stays(state: SwarmState, stage: SavedStage) -> bool:
    """Whether somebody has it who does not leave."""
    return any(not _leaves(state, peer) for peer in holders(state, stage))


def keepers(state: SwarmState, run: Run, stage: SavedStage) -> tuple[PeerId, ...]:
    """Of the holders those that neither leave, nor would be lost with the stage itself."""
    hosts = _hosts(run, stage)
    return tuple(p for p in holders(state, stage) if p not in hosts and not _leaves(state, p))


def candidates(state: SwarmState, run: Run, snapshot: Snapshot, stage: SavedStage) -> list[PeerId]:
    """Members that could keep it too: those that reach who has it first, then who has most room."""
    shard, taken = snapshot.shard(run.run_id, stage), _taken_bytes(state)
    asked = run.keeping.asked.get(shard, frozenset())
    refused = run.keeping.refused.get(shard, frozenset())
    out = {*stage.keepers, *asked, *refused, *_hosts(run, stage)}
    source = next(iter(holders(state, stage)), PeerId(""))

    def order(peer: PeerId) -> tuple[int, int, PeerId]:
        room = state.members[peer].hello.keep_bytes - taken[peer]
        return state.ways.relayed_percent(source, peer), -room, peer

    may = (p for p, member in state.members.items() if p not in out and _may_keep(state, p, member))
    has_room = (p for p in may if state.members[p].hello.keep_bytes - taken[p] >= stage.total_bytes)
    return sorted(has_room, key=order)


def to_ask(
    state: SwarmState, run: Run, snapshot: Snapshot, stage: SavedStage
) -> tuple[PeerId, ...]:
    """Members that are to be asked now to keep it, so that enough do."""
    asked = asked_of(state, run, snapshot.shard(run.run_id, stage))
    lacking = state.num_keepers - len(keepers(state, run, stage)) - len(asked)
    if lacking <= 0 or not holders(state, stage):
        return ()
    return tuple(candidates(state, run, snapshot, stage)[:lacking])


def asked_of(state: SwarmState, run: Run, shard: KeptShard) -> frozenset[PeerId]:
    """Members that were asked to keep it, and have yet to answer."""
    return run.keeping.asked.get(shard, frozenset()) & state.members.keys()


def sole_keeper_of(state: SwarmState, peer: PeerId) -> tuple[Run, SavedStage] | None:
    """What nobody but this member keeps, and others could or are about to."""
    for run in state.runs.values():
        for snapshot, stage in wanted_stages(run):
            if peer not in stage.keepers or len(holders(state, stage)) > 1:
                continue
            asked = asked_of(state, run, snapshot.shard(run.run_id, stage))
            if asked or candidates(state, run, snapshot, stage):
                return run, stage
    return None


def _hosts(run: Run, stage: SavedStage) -> set[PeerId]:
    """Peers of the run that have weights of these layers anyway."""
    assigned = run.attempt.assignments
    return {a.peer_id for a in assigned if a.layers.overlaps(stage.layers)}


def _may_keep(state: SwarmState, peer: PeerId, member: Member) -> bool:
    """Who is on probation may not: all that it is asked for it could say it has."""
    return not member.grant.replica_only and not _leaves(state, peer)


def _leaves(state: SwarmState, peer: PeerId) -> bool:
    """Whether it goes for good; who only pauses can give what it keeps."""
    leaving = state.members[peer].leaving
    return leaving is not None and not leaving.stays


def _taken_bytes(state: SwarmState) -> Counter[PeerId]:
    """Of what members lend, how much is taken, or promised."""
    taken: Counter[PeerId] = Counter()
    for run in state.runs.values():
        for snapshot, stage in wanted_stages(run):
            shard = snapshot.shard(run.run_id, stage)
            for peer in {*stage.keepers, *run.keeping.asked.get(shard, ())}:
                taken[peer] += stage.total_bytes
    return taken


# ---- a snapshot as a whole


def has_all_stages(run: Run, snapshot: Snapshot) -> bool:
    """Whether all that there are of the run's are saved."""
    return [s.layers for s in snapshot.stages] == [s.layers for s in run.stages]


def is_spreading(state: SwarmState, run: Run) -> bool:
    """Whether a snapshot is on its way to its keepers: another one would take its place."""
    asked = run.saving.asked
    return bool(state.num_keepers) and asked is not None and has_all_stages(run, asked)


def saves_when_asked(state: SwarmState, run: Run) -> bool:
    """Whether snapshots are kept, and the job did not say that none are to be taken of it."""
    train = run.spec.train
    is_wanted = state.keeps_snapshots and train.save_strategy is not SaveStrategy.NO
    return train.takes_snapshots or is_wanted


def lacks_keepers(state: SwarmState, run: Run) -> bool:
    """Whether a snapshot that is whole has fewer keepers than it should, and could have more."""
    return any(
        to_ask(state, run, snapshot, stage)
        for snapshot in run.past.snapshots
        for stage in snapshot.stages
    )


def has_leaving_keepers(state: SwarmState, run: Run) -> bool:
    """Whether one of those that keep the run's snapshots is about to go."""
    return any(
        _leaves(state, peer)
        for snapshot in run.past.snapshots
        for stage in snapshot.stages
        for peer in holders(state, stage)
    )


def without_keepers(state: SwarmState, snapshot: Snapshot | None) -> tuple[SavedStage, ...]:
    """Stages of a snapshot that nobody who is there has; none where it lies in a place."""
    stages = snapshot.stages if snapshot is not None else ()
    return tuple(stage for stage in stages if stage.keepers and not holders(state, stage))


def patience_s(state: SwarmState, run: Run) -> float:
    """How long those that keep what a run is to begin with are waited for while they are away.

    As long as it takes to do again what is with them alone, as for a stage's last peer; but they
    may be back in a while with all of it on their disks, so for much longer.
    """
    kept = max((snapshot.step for snapshot in available(state, run)), default=0)
    step_s = median(run.measured.step_seconds or (KEEPERS_S,))
    return min(KEEPERS_S, max(GRACE_S, (run.committed_steps - kept) * step_s))


def available(state: SwarmState, run: Run) -> tuple[Snapshot, ...]:
    """Of the run's snapshots those that can be had from who is there."""
    return tuple(one for one in run.past.snapshots if not without_keepers(state, one))


# ---- when the next one is due, where nobody said


def seen_at_work(run: Run, now_s: float) -> Run:
    """The run of which it is known since when it has no snapshot."""
    if run.keeping.began_s > -math.inf:
        return run
    return replace(run, keeping=replace(run.keeping, began_s=now_s))


def is_due_by_time(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether peers are to keep another snapshot of a job that did not say when."""
    train = run.spec.train
    is_said = train.takes_snapshots or train.save_strategy is SaveStrategy.NO
    if not state.num_keepers or is_said or run.saving.asked is not None:
        return False
    return now_s - run.keeping.began_s >= every_s(run)


def every_s(run: Run) -> float:
    """How long after a snapshot the next one is due, so that they take SHARE of the time.

    Until one was taken, by how large states can be and what a link may bring.
    """
    stages = (state_bytes(run.spec, stage.layers) for stage in run.stages)
    took_s = run.keeping.took_s or max(stages, default=0.0) / UNMEASURED_BYTES_S
    return max(MIN_EVERY_S, took_s / SHARE)
