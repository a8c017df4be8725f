"""Keepers of a run's snapshots, where peers store these. Pure.

The peer that saved a stage keeps it, and `num_keepers` peers that do not host it, so that as many
machines may fail at once. Keepers receive encrypted bytes, and no key.
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
"""Most seconds that a run waits for the only keepers of the snapshot that it starts from."""
GRACE_S = 30.0
"""Least seconds of that wait, and of the wait before other peers are asked to keep their shards."""
SHARE = 0.1
"""Share of the time, and so of links, for snapshots that the job did not schedule."""
MIN_EVERY_S = 60.0
"""Least seconds between such snapshots: small states cost next to nothing."""


# ---- holders of shards


def wanted_stages(run: Run) -> Iterator[tuple[Snapshot, SavedStage]]:
    """Yield the stages of all snapshots to keep: complete ones, and the one under way."""
    if run.phase <= RunPhase.FINISHED:
        for snapshot in (*run.past.snapshots, *([run.saving.asked] if run.saving.asked else ())):
            for stage in snapshot.stages:
                yield snapshot, stage


def holders(state: SwarmState, stage: SavedStage) -> tuple[PeerId, ...]:
    """Return members that have a stage of a snapshot."""
    return tuple(peer for peer in stage.keepers if peer in state.members)


def has_staying_holder(state: SwarmState, stage: SavedStage) -> bool:
    """Whether a member that does not leave has the stage."""
    return any(not _leaves(state, peer) for peer in holders(state, stage))


def num_staying(state: SwarmState) -> int:
    """Count the members that do not leave for good."""
    return sum(not _leaves(state, peer) for peer in state.members)


def keepers(state: SwarmState, run: Run, stage: SavedStage) -> tuple[PeerId, ...]:
    """Return the holders that neither leave, nor would be lost together with the stage."""
    hosts = _hosts(run, stage)
    return tuple(p for p in holders(state, stage) if p not in hosts and not _leaves(state, p))


def candidates(state: SwarmState, run: Run, snapshot: Snapshot, stage: SavedStage) -> list[PeerId]:
    """Return members that could keep the stage too.

    Those that the first holder reaches directly come first, then those with more free room.
    """
    shard, used = snapshot.shard(run.run_id, stage), _taken_bytes(state)
    requested = run.keeping.asked.get(shard, frozenset())
    refused = run.keeping.refused.get(shard, frozenset())
    out = {*stage.keepers, *requested, *refused, *_hosts(run, stage)}
    source = next(iter(holders(state, stage)), PeerId(""))

    def order(peer: PeerId) -> tuple[int, int, PeerId]:
        room = state.members[peer].hello.keep_bytes - used[peer]
        return state.ways.relayed_percent(source, peer), -room, peer

    may = (p for p, member in state.members.items() if p not in out and _may_keep(state, p, member))
    has_room = (p for p in may if state.members[p].hello.keep_bytes - used[p] >= stage.total_bytes)
    return sorted(has_room, key=order)


def keepers_to_request(
    state: SwarmState, run: Run, snapshot: Snapshot, stage: SavedStage
) -> tuple[PeerId, ...]:
    """Return members to request now, so that enough peers keep the stage."""
    requested = requested_keepers(state, run, snapshot.shard(run.run_id, stage))
    lacking = state.num_keepers - len(keepers(state, run, stage)) - len(requested)
    if lacking <= 0 or not holders(state, stage):
        return ()
    return tuple(candidates(state, run, snapshot, stage)[:lacking])


def requested_keepers(state: SwarmState, run: Run, shard: KeptShard) -> frozenset[PeerId]:
    """Return members with an unanswered request to keep the shard."""
    return run.keeping.asked.get(shard, frozenset()) & state.members.keys()


def sole_keeper_of(state: SwarmState, peer: PeerId) -> tuple[Run, SavedStage] | None:
    """Return a stage that only this member keeps while others could take a copy, or None."""
    for run in state.runs.values():
        for snapshot, stage in wanted_stages(run):
            if peer not in stage.keepers or len(holders(state, stage)) > 1:
                continue
            requested = requested_keepers(state, run, snapshot.shard(run.run_id, stage))
            if requested or candidates(state, run, snapshot, stage):
                return run, stage
    return None


def _hosts(run: Run, stage: SavedStage) -> set[PeerId]:
    """Return peers of the run that host some of these layers."""
    assigned = run.attempt.assignments
    return {a.peer_id for a in assigned if a.layers.overlaps(stage.layers)}


def _may_keep(state: SwarmState, peer: PeerId, member: Member) -> bool:
    """Whether a member may keep shards; the reports of one on probation are not trusted."""
    return not member.grant.replica_only and not _leaves(state, peer)


def _leaves(state: SwarmState, peer: PeerId) -> bool:
    """Whether the member leaves for good; a paused one can still send its shards."""
    leaving = state.members[peer].leaving
    return leaving is not None and not leaving.stays


def _taken_bytes(state: SwarmState) -> Counter[PeerId]:
    """Return the bytes of each member's storage that are used or reserved."""
    used: Counter[PeerId] = Counter()
    for run in state.runs.values():
        for snapshot, stage in wanted_stages(run):
            shard = snapshot.shard(run.run_id, stage)
            for peer in {*stage.keepers, *run.keeping.asked.get(shard, ())}:
                used[peer] += stage.total_bytes
    return used


# ---- a snapshot as a whole


def has_all_stages(run: Run, snapshot: Snapshot) -> bool:
    """Whether all of the run's stages are saved."""
    return [s.layers for s in snapshot.stages] == [s.layers for s in run.stages]


def is_spreading(state: SwarmState, run: Run) -> bool:
    """Whether a snapshot is on its way to its keepers; another one would replace it."""
    asked = run.saving.asked
    return bool(state.num_keepers) and asked is not None and has_all_stages(run, asked)


def can_take_snapshots(state: SwarmState, run: Run) -> bool:
    """Whether snapshots are possible, and the job does not forbid them."""
    train = run.spec.train
    is_wanted = state.keeps_snapshots and train.save_strategy is not SaveStrategy.NO
    return train.takes_snapshots or is_wanted


def lacks_keepers(state: SwarmState, run: Run) -> bool:
    """Whether a complete snapshot has fewer keepers than it should and could have."""
    return any(
        keepers_to_request(state, run, snapshot, stage)
        for snapshot in run.past.snapshots
        for stage in snapshot.stages
    )


def has_leaving_keepers(state: SwarmState, run: Run) -> bool:
    """Whether a keeper of the run's snapshots leaves."""
    return any(
        _leaves(state, peer)
        for snapshot in run.past.snapshots
        for stage in snapshot.stages
        for peer in holders(state, stage)
    )


def without_keepers(state: SwarmState, snapshot: Snapshot | None) -> tuple[SavedStage, ...]:
    """Return a snapshot's stages that no connected peer has; none with a common directory."""
    stages = snapshot.stages if snapshot is not None else ()
    return tuple(stage for stage in stages if stage.keepers and not holders(state, stage))


def patience_s(state: SwarmState, run: Run) -> float:
    """Return the seconds that a run waits for absent keepers of the snapshot that it starts from.

    The wait is as long as repeating the steps that only they have, as for a stage's last peer; but
    since keepers may come back with everything on their disks, the limit is much longer.
    """
    newest_step = max((snapshot.step for snapshot in available(state, run)), default=0)
    step_s = median(run.measured.step_seconds or (KEEPERS_S,))
    return min(KEEPERS_S, max(GRACE_S, (run.committed_steps - newest_step) * step_s))


def available(state: SwarmState, run: Run) -> tuple[Snapshot, ...]:
    """Return the run's snapshots that connected peers have."""
    return tuple(one for one in run.past.snapshots if not without_keepers(state, one))


# ---- snapshots of jobs without a schedule


def seen_at_work(run: Run, now_s: float) -> Run:
    """Return the run with the time since which it has no snapshot."""
    if run.keeping.began_s > -math.inf:
        return run
    return replace(run, keeping=replace(run.keeping, began_s=now_s))


def is_due_by_time(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether peers should keep another snapshot of a job without a schedule."""
    train = run.spec.train
    is_scheduled = train.takes_snapshots or train.save_strategy is SaveStrategy.NO
    if not state.num_keepers or is_scheduled or run.saving.asked is not None:
        return False
    return now_s - run.keeping.began_s >= snapshot_interval_s(run)


def snapshot_interval_s(run: Run) -> float:
    """Return the seconds between snapshots, such that they take `SHARE` of the time.

    Before the first one it is estimated from the largest state and an assumed rate.
    """
    stages = (state_bytes(run.spec, stage.layers) for stage in run.stages)
    took_s = run.keeping.took_s or max(stages, default=0.0) / UNMEASURED_BYTES_S
    return max(MIN_EVERY_S, took_s / SHARE)
