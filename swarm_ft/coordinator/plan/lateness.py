"""Peers that the others wait for: limits, and what follows. Pure.

A phase ends when all peers report that they are ready: they have their stage, did their part of a
step, or wrote their result. A connected peer that never does must not block the others. It is
*overdue* once

- it neither makes progress nor waits for others, for longer than its present work can take; or
- all peers that are not ready wait for each other, for longer than a message can take, and most of
  them wait for it.

An overdue peer is *late* if the run can do without it: a replica on probation replaces nobody. A
learner blocks nobody, but it receives every sum: it is late if copying its state takes too long.

A peer measures its own time, without that of other runs whose stages it hosts. It may take as many
times longer as there are such runs. It may also take the time in which these load or write their
stages, which nothing interrupts. Before it loads a stage it lets other runs end their steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import ModelSpec, RunSpec

LOAD_S = 60.0
"""Seconds to load a stage of any size: codecs may have to be compiled."""
MIN_LOAD_BYTES_S = 1e6
"""Least rate at which a stage is read, fetched from a hub, or written."""
MIN_STATE_BYTES_S = 0.25e6
"""Least rate at which a stage's state arrives over links that also carry a step's tensors."""
UNMEASURED_BYTES_S = 12.5e6
"""Assumed rate of a state before any measurement."""
FACTOR = 4.0
"""Most times that a peer may take longer than it, or a replica, ever did."""
CONNECT_S = 20.0
"""Seconds in which loaded peers must reach each other. A dialling peer gives up later, and would be
taken for the failing one.
"""
STEP_S = 30.0
"""Seconds without progress that a peer may have in a step, beside its work."""


def late_peers(state: SwarmState, run: Run, now_s: float) -> dict[PeerId, Reason]:
    """Return peers that are late, with the reason of each."""
    overdue = overdue_peers(state, run, now_s)
    late = {peer: why for peer, why in overdue.items() if _is_spare(state, run, peer, overdue)}
    return late | _late_learners(state, run, now_s)


def overdue_peers(state: SwarmState, run: Run, now_s: float) -> dict[PeerId, Reason]:
    """Return peers that are overdue, with the reason of each. See the module."""
    absent, awaited = _absent(run), run.attempt.awaited
    mute = [peer for peer in absent if not awaited.waits_for.get(peer)]
    since_s = {peer: awaited.last_excused_s(peer) for peer in mute}
    overdue = [peer for peer in mute if now_s - since_s[peer] >= _limit_s(state, run, peer)]
    if absent and not mute and now_s - awaited.newest_s >= _deadlock_limit_s(state, run):
        overdue = [_deadlock_victim(state, run, absent)]
    late_s = {p: now_s - since_s.get(p, awaited.newest_s) for p in overdue}
    return {p: _late_in_phase(run, seconds) for p, seconds in late_s.items()}


def _absent(run: Run) -> list[PeerId]:
    """Return peers that are not ready in this phase."""
    ready: Collection[PeerId] = run.peers
    if run.phase is RunPhase.LOADING:
        ready = {*run.attempt.loaded, *run.misfits}
    elif run.phase is RunPhase.TRAINING and run.step is not None:
        ready = run.step.ready
    elif run.phase is RunPhase.EXPORTING:
        ready = run.past.exported
    return [peer for peer in run.peers if peer not in ready]


def _deadlock_victim(state: SwarmState, run: Run, absent: Collection[PeerId]) -> PeerId:
    """Return the peer that most others wait for, directly or through other peers.

    The coordinator itself waits for all that are not ready. Ties are broken by these rules, in
    order:

    - a peer without which the run can go on;
    - a listener;
    - a peer that is not ready;
    - the peer that more peers name directly;
    - the last peer, since newcomers stand behind.

    Reports of peers on probation do not count: any number of them could name the same peer.
    """
    credible = filter(state.may_host_alone, absent)
    waits_for = {p: run.attempt.awaited.waits_for[p].intersection(run.peers) for p in credible}
    named = Counter(q for others in waits_for.values() for q in others)
    missed = Counter(absent)
    for peer in absent:
        missed.update(_reached(waits_for, peer) - {peer})

    def order(peer: PeerId) -> tuple[int, bool, bool, bool, int]:
        is_spare, is_listening = _is_spare(state, run, peer, ()), peer in run.listeners
        return missed[peer], is_spare, is_listening, peer in absent, named[peer]

    return max(reversed(run.peers), key=order)


def _reached(waits_for: Mapping[PeerId, Collection[PeerId]], peer: PeerId) -> set[PeerId]:
    """Return all peers that a peer waits for, directly or through others."""
    found: set[PeerId] = set()
    new = {peer}
    while new:
        new = {q for p in new for q in waits_for.get(p, ())} - found
        found |= new
    return found


def _late_in_phase(run: Run, seconds: float) -> Reason:
    match run.phase:
        case RunPhase.LOADING:
            return Reason(kind=ReasonKind.LATE_LOADING, amount=seconds)
        case RunPhase.EXPORTING:
            return Reason(kind=ReasonKind.LATE_EXPORT, amount=seconds)
        case _:
            return Reason(kind=ReasonKind.LATE_STEP, step=run.committed_steps, amount=seconds)


def _is_spare(state: SwarmState, run: Run, peer: PeerId, overdue: Collection[PeerId]) -> bool:
    """Whether another peer has the peer's stage, or the peer itself does not have it yet."""
    learning = set(_learning(run))
    others = [p for p in _stage(run, peer).peers if p not in {peer, *overdue, *learning}]
    return peer in learning or any(map(state.may_host_alone, others))


def _learning(run: Run) -> Iterator[PeerId]:
    caught_up = run.attempt.caught_up
    return (t.peer_id for t in run.attempt.learners if t.peer_id not in caught_up)


def _late_learners(state: SwarmState, run: Run, now_s: float) -> dict[PeerId, Reason]:
    since_s = run.attempt.learning_since_s

    def limit_s(peer: PeerId) -> float:
        own_s = hand_over_limit_s(run.spec, _stage(run, peer).layers)
        return _shared_s(state, run, peer, own_s)

    took_s = {peer: now_s - since_s[peer] for peer in _learning(run) if peer in since_s}
    return {
        peer: Reason(kind=ReasonKind.LATE_STATE, amount=seconds)
        for peer, seconds in took_s.items()
        if seconds >= limit_s(peer)
    }


# ---- limits


def hand_over_limit_s(spec: RunSpec, layers: LayerRange) -> float:
    """Return the seconds in which a learner must have its stage's state, on the slowest link."""
    return LOAD_S + state_bytes(spec, layers) / MIN_STATE_BYTES_S


def _is_taken_from_keepers(run: Run) -> bool:
    """Whether the run starts from shards of keepers, which also arrive over links."""
    saved = run.past.saved
    return saved is not None and any(stage.keepers for stage in saved.stages)


def state_bytes(spec: RunSpec, layers: LayerRange) -> float:
    """Return the most bytes of a stage's state: weights and optimizer state, no gradients."""
    return (spec.train.copies_per_weight - 1) * _weight_bytes(spec.model, layers)


def _limit_s(state: SwarmState, run: Run, peer: PeerId) -> float:
    """Return the seconds that a peer may take without reporting progress."""
    return _shared_s(state, run, peer, _own_limit_s(run, peer))


def _shared_s(state: SwarmState, run: Run, peer: PeerId, own_s: float) -> float:
    """Return the seconds that a peer may take for this run if it alone would take `own_s`."""
    others = [other for other in state.runs_of(peer) if other.run_id != run.run_id]
    busy = (_load_limit_s(other, _stage(other, peer)) for other in others if _is_at_files(other))
    return own_s * (1 + len(others)) + sum(busy)


def _is_at_files(run: Run) -> bool:
    """Whether its peers load or write stages, or did when another run's step began."""
    last = run.past.last_commit
    has_stepped = last is not None and last.attempt == run.attempt.number
    return run.phase is not RunPhase.TRAINING or not has_stepped


def _own_limit_s(run: Run, peer: PeerId) -> float:
    stage = _stage(run, peer)
    if run.phase is RunPhase.TRAINING:
        took_s = [s for p in stage.peers for s in run.measured.seconds.get(p, ())]
        return STEP_S + FACTOR * max(took_s) if took_s else _load_limit_s(run, stage)
    if peer in run.listeners:
        return LOAD_S
    awaited, learning = run.attempt.awaited, set(_learning(run))
    if peer in learning or _is_taken_from_keepers(run):
        return hand_over_limit_s(run.spec, stage.layers)
    took = [
        awaited.moved_s[p] - awaited.since_s
        for p in stage.peers
        if p in awaited.moved_s and p not in learning
    ]
    return min([_load_limit_s(run, stage), *(LOAD_S + FACTOR * seconds for seconds in took)])


def _deadlock_limit_s(state: SwarmState, run: Run) -> float:
    """Return the seconds that all may wait for each other: no message takes longer than a step."""
    if run.phase is RunPhase.LOADING:
        return CONNECT_S
    slowest_s = max(_load_limit_s(run, stage) for stage in run.stages)
    own_s = STEP_S + max(run.measured.step_seconds, default=slowest_s)
    return max(_shared_s(state, run, peer, own_s) for peer in run.peers)


def _load_limit_s(run: Run, stage: Stage) -> float:
    return LOAD_S + _weight_bytes(run.spec.model, stage.layers) / MIN_LOAD_BYTES_S


def _weight_bytes(model: ModelSpec, layers: LayerRange) -> int:
    """Return the bytes of a stage's weights, as float32."""
    num_ends = (layers.start == 0) + (layers.stop == model.num_blocks)
    embedding_bytes = 4 * model.vocab_size * model.hidden_size
    return len(layers) * model.block_bytes + model.shared_bytes + num_ends * embedding_bytes


def _stage(run: Run, peer: PeerId) -> Stage:
    return next(stage for stage in run.stages if peer in stage.peers)
