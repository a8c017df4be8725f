"""Peers that the others wait for: for how long, and what then. Pure.

A phase ends when all said that they are ready: that they have their stage, did their part of a
step, or wrote their result down. Who is connected and says nothing of it must not hold the others
up for ever. It is *overdue* once

- it neither gets on nor says that it waits for others, for longer than what it does can take; or
- all who are not ready wait for each other, for longer than a message can take, and it is the one
  whom the most miss.

An overdue peer is *late* if the run can do without it: a replica on probation stands in for nobody.
A newcomer that takes its stage's state over holds nobody up, but it gets every sum: it is late if
that takes too long.

What a peer measures is its own time, without that of other runs whose stages it hosts. It may take
so many times as long as there are such, and as long besides as these take to load or to write
theirs, which nothing interrupts. Before it loads one of its own it lets them end their steps.
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
"""How long it may take to have a stage, whatever its size: codecs may have to be compiled."""
MIN_LOAD_BYTES_S = 1e6
"""A stage is read, fetched from a hub, or written down, at this rate at least."""
MIN_STATE_BYTES_S = 0.25e6
"""A stage's state comes over links that carry a step's tensors too, at this rate at least."""
UNMEASURED_BYTES_S = 12.5e6
"""At which a state is thought to travel before anything was measured."""
FACTOR = 4.0
"""A peer may take so many times as long as it, or a replica, ever did."""
CONNECT_S = 20.0
"""How long peers that have their stages may take to reach each other: less than after which the
one that dials gives up, and would be thought the one that fails."""
STEP_S = 30.0
"""How long a peer may stand still in a step, beside what its work takes."""


def late_peers(state: SwarmState, run: Run, now_s: float) -> dict[PeerId, Reason]:
    """Peers that the others have waited for long enough, and can do without; what each did."""
    overdue = overdue_peers(state, run, now_s)
    late = {peer: why for peer, why in overdue.items() if _is_spare(state, run, peer, overdue)}
    return late | _late_learners(state, run, now_s)


def overdue_peers(state: SwarmState, run: Run, now_s: float) -> dict[PeerId, Reason]:
    """Peers that the others have waited for long enough, and what each did. See the module."""
    absent, awaited = _absent(run), run.attempt.awaited
    mute = [peer for peer in absent if not awaited.waits_for.get(peer)]
    since_s = {peer: awaited.excused_until_s(peer) for peer in mute}
    overdue = [peer for peer in mute if now_s - since_s[peer] >= _limit_s(state, run, peer)]
    if absent and not mute and now_s - awaited.newest_s >= _deadlock_limit_s(state, run):
        overdue = [_most_missed(state, run, absent)]
    late_s = {p: now_s - since_s.get(p, awaited.newest_s) for p in overdue}
    return {p: _late_in_phase(run, seconds) for p, seconds in late_s.items()}


def _absent(run: Run) -> list[PeerId]:
    """Peers that are not ready with what the phase is about."""
    ready: Collection[PeerId] = run.peers
    if run.phase is RunPhase.LOADING:
        ready = {*run.attempt.loaded, *run.misfits}
    elif run.phase is RunPhase.TRAINING and run.step is not None:
        ready = run.step.ready
    elif run.phase is RunPhase.EXPORTING:
        ready = run.past.exported
    return [peer for peer in run.peers if peer not in ready]


def _most_missed(state: SwarmState, run: Run, absent: Collection[PeerId]) -> PeerId:
    """Whom the most wait for, themselves or because those do for whom they wait.

    The coordinator itself waits for those that are not ready. Of peers that are missed alike, such
    as two that name each other, it is one without which the run can go on, one that only listens,
    one that is not ready, whom more name themselves, or the last one: newcomers stand behind.
    Whom those on probation name does not count: as many as like could name the same.
    """
    heard = filter(state.carries, absent)
    waits_for = {p: run.attempt.awaited.waits_for[p].intersection(run.peers) for p in heard}
    named = Counter(q for others in waits_for.values() for q in others)
    missed = Counter(absent)
    for peer in absent:
        missed.update(_reached(waits_for, peer) - {peer})

    def order(peer: PeerId) -> tuple[int, bool, bool, bool, int]:
        is_spare, is_listening = _is_spare(state, run, peer, ()), peer in run.listeners
        return missed[peer], is_spare, is_listening, peer in absent, named[peer]

    return max(reversed(run.peers), key=order)


def _reached(waits_for: Mapping[PeerId, Collection[PeerId]], peer: PeerId) -> set[PeerId]:
    """For whom a peer waits, for whom these wait, and so on."""
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
    """Whether somebody else has the peer's stage, or it has not got it itself."""
    learning = set(_learning(run))
    others = [p for p in _stage(run, peer).peers if p not in {peer, *overdue, *learning}]
    return peer in learning or any(map(state.carries, others))


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


# ---- how long things may take


def hand_over_limit_s(spec: RunSpec, layers: LayerRange) -> float:
    """Within what time a newcomer has its stage's state, however slow its link is."""
    return LOAD_S + state_bytes(spec, layers) / MIN_STATE_BYTES_S


def _is_taken_from_keepers(run: Run) -> bool:
    """Whether the run begins with what peers keep of it, which comes over links as well."""
    saved = run.past.saved
    return saved is not None and any(stage.keepers for stage in saved.stages)


def state_bytes(spec: RunSpec, layers: LayerRange) -> float:
    """Of a stage's state, at most: weights and what an optimizer keeps; no gradients."""
    return (spec.train.copies_per_weight - 1) * _weight_bytes(spec.model, layers)


def _limit_s(state: SwarmState, run: Run, peer: PeerId) -> float:
    """How long a peer may go on without a word of what it is at."""
    return _shared_s(state, run, peer, _own_limit_s(run, peer))


def _shared_s(state: SwarmState, run: Run, peer: PeerId, own_s: float) -> float:
    """What a peer may take for this run, if it alone would take `own_s`."""
    others = [other for other in state.runs_of(peer) if other.run_id != run.run_id]
    busy = (_load_limit_s(other, _stage(other, peer)) for other in others if _is_at_files(other))
    return own_s * (1 + len(others)) + sum(busy)


def _is_at_files(run: Run) -> bool:
    """Whether its peers load or write their stages, or did when the step of another run began."""
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
    """How long all may wait for each other: what is on its way takes no longer than a step."""
    if run.phase is RunPhase.LOADING:
        return CONNECT_S
    slowest_s = max(_load_limit_s(run, stage) for stage in run.stages)
    own_s = STEP_S + max(run.measured.step_seconds, default=slowest_s)
    return max(_shared_s(state, run, peer, own_s) for peer in run.peers)


def _load_limit_s(run: Run, stage: Stage) -> float:
    return LOAD_S + _weight_bytes(run.spec.model, stage.layers) / MIN_LOAD_BYTES_S


def _weight_bytes(model: ModelSpec, layers: LayerRange) -> int:
    """Of a stage, float32."""
    num_ends = (layers.start == 0) + (layers.stop == model.num_blocks)
    embedding_bytes = 4 * model.vocab_size * model.hidden_size
    return len(layers) * model.block_bytes + model.shared_bytes + num_ends * embedding_bytes


def _stage(run: Run, peer: PeerId) -> Stage:
    return next(stage for stage in run.stages if peer in stage.peers)
