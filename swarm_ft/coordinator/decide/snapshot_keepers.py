"""Snapshots at peers: they are spread, counted, spread again, and dropped.

A snapshot is complete once each of its stages has enough keepers, or all that there are. Without
keepers, the peer that saved a stage keeps it alone. An absent keeper may come back with its shards;
after a while another peer gets a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.decide import attempts, snapshots
from swarm_ft.coordinator.facts.events import SnapshotRecord, Transition
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Run, Snapshot
from swarm_ft.coordinator.plan.keepers import (
    GRACE_S,
    has_all_stages,
    has_leaving_keepers,
    has_staying_holder,
    holders,
    keepers_to_request,
    lacks_keepers,
    num_staying,
    requested_keepers,
    wanted_stages,
)
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    DropShards,
    GiveShard,
    KeepShard,
    PeerHello,
    SavedStage,
    ShardKept,
    ShardLost,
)
from swarm_ft.protocol.messages.shard import KeptShard


def reconcile(turn: Transition) -> None:
    """Spread stages that were just saved to enough keepers."""
    if not turn.state.num_keepers:
        return
    for run in [run for run in turn.state.runs.values() if run.phase <= RunPhase.FINISHED]:
        if run.saving.asked is not None:
            _spread(turn, run, run.saving.asked)
            _look_whether_whole(turn, turn.state.runs[run.run_id])


def reconcile_complete(turn: Transition) -> None:
    """Find new keepers for shards with too few connected ones, unless these return soon."""
    if not turn.state.num_keepers:
        return
    for run in [run for run in turn.state.runs.values() if run.past.snapshots]:
        since_s = min(run.keeping.lacking_since_s, turn.now_s)
        since_s = since_s if lacks_keepers(turn.state, run) else math.inf
        if since_s != run.keeping.lacking_since_s:
            turn.set_run(replace(run, keeping=replace(run.keeping, lacking_since_s=since_s)))
        is_late = turn.now_s - since_s >= GRACE_S
        if since_s < math.inf and (is_late or has_leaving_keepers(turn.state, run)):
            for snapshot in run.past.snapshots:
                _spread(turn, turn.state.runs[run.run_id], snapshot)


def _spread(turn: Transition, run: Run, snapshot: Snapshot) -> None:
    """Request keepers for the saved stages of a snapshot that lack some."""
    for stage in snapshot.stages:
        run = turn.state.runs[run.run_id]
        new = keepers_to_request(turn.state, run, snapshot, stage)
        if not new:
            continue
        shard, sources = snapshot.shard(run.run_id, stage), holders(turn.state, stage)
        turn.set_run(_with_asked(run, shard, run.keeping.asked.get(shard, frozenset()) | {*new}))
        for source in sources:
            turn.send(source, GiveShard(name=shard.name, takers=new))
        for peer in new:
            turn.send(peer, KeepShard(name=shard.name, file=stage.file, sources=sources))


def _look_whether_whole(turn: Transition, run: Run) -> None:
    """Complete a saved snapshot once it has enough keepers, or drop it if none can keep it."""
    snapshot = run.saving.asked
    if snapshot is None or not has_all_stages(run, snapshot):
        return
    for stage in snapshot.stages:
        if requested_keepers(turn.state, run, snapshot.shard(run.run_id, stage)):
            return
    without = replace(run, saving=replace(run.saving, asked=None))
    for stage in snapshot.stages:
        if not has_staying_holder(turn.state, stage):
            staying = num_staying(turn.state)
            no_room = Reason(kind=ReasonKind.NO_KEEPER, layers=(stage.layers,), amount=staying)
            snapshots.fail(turn, without, snapshot.step, no_room)
            _drop_others(turn, turn.state.runs[run.run_id])
            return
    keeping = replace(run.keeping, took_s=turn.now_s - run.keeping.began_s)
    snapshots.complete(turn, replace(without, keeping=keeping), snapshot)
    _drop_others(turn, turn.state.runs[run.run_id])


def _drop_others(turn: Transition, run: Run) -> None:
    """Have all members delete shards that the run no longer needs."""
    wanted = {snapshot.shard(run.run_id, stage) for snapshot, stage in wanted_stages(run)}
    keeping = run.keeping
    requests = {shard: peers for shard, peers in keeping.asked.items() if shard in wanted}
    refusals = {shard: peers for shard, peers in keeping.refused.items() if shard in wanted}
    keeping = replace(keeping, asked=MappingProxyType(requests), refused=MappingProxyType(refusals))
    turn.set_run(replace(run, keeping=keeping))
    for peer in turn.state.members:
        _tell_what_to_keep(turn, run.run_id, peer)


# ---- messages of keepers


def on_message(turn: Transition, peer_id: PeerId, message: ShardKept | ShardLost) -> None:
    """Record that a peer keeps a shard, or does not."""
    shard = message.shard
    run = turn.state.runs.get(shard.name.run_id)
    if run is None:
        return
    requested = run.keeping.asked.get(shard, frozenset())
    if peer_id not in requested and not _keeps(run, shard, peer_id):
        return
    run = _with_asked(run, shard, requested - {peer_id})
    if isinstance(message, ShardLost):
        refused = run.keeping.refused.get(shard, frozenset()) | {peer_id}
        run = _with_refused(run, shard, refused)
    _count(turn, run, shard, peer_id, has_it=isinstance(message, ShardKept))


def joined(turn: Transition, hello: PeerHello) -> None:
    """Update the keepers by a joining peer's inventory, and have it delete useless shards."""
    has, peer_id = set(hello.kept_shards), hello.peer_id
    for run in [run for run in turn.state.runs.values() if run.phase <= RunPhase.FINISHED]:
        requests, refusals = run.keeping.asked, run.keeping.refused
        if any(peer_id in peers for peers in (*requests.values(), *refusals.values())):
            keeping = replace(
                run.keeping, asked=_without(requests, peer_id), refused=_without(refusals, peer_id)
            )
            turn.set_run(replace(run, keeping=keeping))
        for snapshot, stage in tuple(wanted_stages(run)):
            shard = snapshot.shard(run.run_id, stage)
            if (shard in has) != (peer_id in stage.keepers):
                _count(turn, turn.state.runs[run.run_id], shard, peer_id, has_it=shard in has)
    for run_id in {shard.name.run_id for shard in has}:
        _tell_what_to_keep(turn, run_id, peer_id)


def _tell_what_to_keep(turn: Transition, run_id: RunId, peer_id: PeerId) -> None:
    """Send a peer the steps to keep of a run; of unknown runs send nothing."""
    run = turn.state.runs.get(run_id)
    if run is not None:
        steps = {snapshot.step for snapshot, _ in wanted_stages(run)}
        turn.send(peer_id, DropShards(run_id=run_id, but=tuple(sorted(steps))))


def _count(turn: Transition, run: Run, shard: KeptShard, peer_id: PeerId, *, has_it: bool) -> None:
    """Record whether a peer keeps a stage; write it if the snapshot is complete."""
    turn.set_run(run)
    for snapshot, stage in wanted_stages(run):
        if snapshot.shard(run.run_id, stage) != shard:
            continue
        others = tuple(peer for peer in stage.keepers if peer != peer_id)
        having = (*others, peer_id) if has_it else others
        if having:
            _keep_with(turn, run, snapshot, replace(stage, keepers=having))
        elif stage.keepers:
            _lost(turn, run, snapshot, stage)
        return


def _keep_with(turn: Transition, run: Run, snapshot: Snapshot, stage: SavedStage) -> None:
    changed = snapshot.with_stage(stage)
    if snapshot == run.saving.asked:
        turn.set_run(replace(run, saving=replace(run.saving, asked=changed)))
        return
    kept = tuple(changed if one == snapshot else one for one in run.past.snapshots)
    turn.set_run(replace(run, past=replace(run.past, snapshots=kept)))
    turn.write(SnapshotRecord(run.run_id, changed, frozenset(one.step for one in kept)))


def _lost(turn: Transition, run: Run, snapshot: Snapshot, stage: SavedStage) -> None:
    """Drop a snapshot that lacks this stage; a run that starts from it goes further back."""
    reason = Reason(kind=ReasonKind.KEEPERS_GONE, layers=(stage.layers,))
    if snapshot == run.saving.asked:
        run = replace(run, saving=replace(run.saving, asked=None))
        snapshots.fail(turn, run, snapshot.step, reason)
        return
    left = tuple(one for one in run.past.snapshots if one != snapshot)
    run = replace(run, past=replace(run.past, snapshots=left))
    turn.set_run(run)
    turn.write(SnapshotRecord(run.run_id, snapshot, frozenset(one.step for one in left)))
    snapshots.fail(turn, run, snapshot.step, reason)
    begins_there = run.committed_steps == snapshot.step and run.past.trained_steps is None
    if begins_there and not run.attempt.assignments:
        attempts.go_back(turn, turn.state.runs[run.run_id], reason, [stage.layers])


def _keeps(run: Run, shard: KeptShard, peer_id: PeerId) -> bool:
    return any(
        snapshot.shard(run.run_id, stage) == shard and peer_id in stage.keepers
        for snapshot, stage in wanted_stages(run)
    )


def _with_asked(run: Run, shard: KeptShard, peers: frozenset[PeerId]) -> Run:
    requests = MappingProxyType({**run.keeping.asked, shard: peers})
    return replace(run, keeping=replace(run.keeping, asked=requests))


def _with_refused(run: Run, shard: KeptShard, peers: frozenset[PeerId]) -> Run:
    refusals = MappingProxyType({**run.keeping.refused, shard: peers})
    return replace(run, keeping=replace(run.keeping, refused=refusals))


def _without(
    named: Mapping[KeptShard, frozenset[PeerId]], peer_id: PeerId
) -> Mapping[KeptShard, frozenset[PeerId]]:
    return MappingProxyType({shard: peers - {peer_id} for shard, peers in named.items()})
