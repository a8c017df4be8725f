"""Buffers that follow their samples to other peers, before these pass there. Pure.

The next steps are planned ahead, as they will be planned. Where a sample's way then leads past a
peer that lacks its buffer and somebody has it, that peer is told to fetch it; once it has, the
ledger says so, and the plan itself finds the sample there. If it is late, the sample begins anew
with a key frame. Where that is cheaper from the start, nobody is told anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from swarm_ft.coordinator.holdings import ends_of
from swarm_ft.coordinator.routes import plan_microbatches, room_of, routes_of
from swarm_ft.coordinator.state import Run
from swarm_ft.coordinator.turn import Turn
from swarm_ft.ids import BlockIndex, PeerId, SampleId, StepNumber
from swarm_ft.protocol.buffer_wire import MAX_FOLLOWING
from swarm_ft.protocol.codec_cost import buffer_bytes, key_frame_extra_bytes
from swarm_ft.protocol.coordinator_messages import FollowBuffers
from swarm_ft.protocol.peer_messages import BuffersFollowed
from swarm_ft.protocol.training_plan import Microbatch, step_samples

LOOKAHEAD = 8
"""Steps: a hand-off has the time of so many to arrive on bandwidth that the training leaves."""
MAX_EPOCH_SHARE = 4
"""At most a fourth of an epoch: who looks farther finds samples that are visited before that."""
MAX_TOLD = 32
"""Messages to a peer at once, those of most samples; what is left out begins anew."""
MAX_NAMED = 4
"""Peers in a line of the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A sample is to cross a boundary between peers of which one or both lack its buffer.

    Attributes:
        lacking: these peers.
        holders: who has it, of the run's peers.
    """

    sample: SampleId
    boundary: BlockIndex
    lacking: tuple[PeerId, ...]
    holders: tuple[PeerId, ...]


def look_ahead(turn: Turn, run: Run) -> None:
    """After a plan: see which buffers have to move for the steps to come, and say so."""
    if run.ledger is None:
        return
    horizon = _horizon(run)
    moves = [move for move in _moves_ahead(run, horizon) if move.holders]
    asked, explained = dict(run.hand_offs.asked), run.hand_offs.explained
    for num_lacking in (1, 2):
        some = [move for move in moves if len(move.lacking) == num_lacking]
        choice = _Choice.of(run, num_lacking)
        if some and choice.kind not in explained:
            turn.note(run.run_id, choice.in_words(some))
            explained |= {choice.kind}
        for peer, follow in _follows(run, some if choice.is_hand_off else ()):
            turn.say(peer, follow)
            for sample in follow.samples:
                asked[sample] = asked.get(sample, frozenset()) | {(follow.boundary, peer)}
    hand_offs = replace(
        run.hand_offs,
        pipeline=run.computing,
        room=room_of(run.spec.train, run.computing, run.seconds),
        next_step=StepNumber(horizon.stop),
        asked=MappingProxyType(asked),
        explained=explained,
    )
    turn.keep(replace(run, hand_offs=hand_offs))


def followed(turn: Turn, run: Run, peer_id: PeerId, message: BuffersFollowed) -> None:
    """A peer has buffers that it was told to get, unless their samples went on since."""
    side = ends_of(run, peer_id).get(message.boundary)
    asked, end = run.hand_offs.asked, (message.boundary, peer_id)
    samples = [sample for sample in message.samples if end in asked.get(sample, ())]
    if run.ledger is None or side is None or not samples:
        return
    after = replace(run, ledger=run.ledger.moved(message.boundary, side, samples, peer_id))
    turn.keep(after)
    turn.write_ledger(run, after)


# ---- what will have to move


def _horizon(run: Run) -> range:
    """Steps that are to be looked at now.

    One; or all of them if what was seen before is void: in a new attempt, with other peers, or with
    other shares, since that changes who must leave.
    """
    train, offs = run.spec.train, run.hand_offs
    lookahead = min(LOOKAHEAD, max(1, train.steps_per_epoch // MAX_EPOCH_SHARE))
    first = run.committed_steps + 1
    stop = min(first + lookahead, train.num_steps)
    seen = (offs.pipeline, offs.room)
    if seen == (run.computing, room_of(train, run.computing, run.seconds)):
        first = max(first, offs.next_step)
    return range(first, max(first, stop))


def _moves_ahead(run: Run, steps: range) -> Iterator[Move]:
    train = run.spec.train
    between = range(run.committed_steps, steps.start)
    # What becomes of a sample that is visited before is not known yet.
    visited = {sample for step in between for sample in step_samples(train, StepNumber(step))}
    for step in map(StepNumber, steps):
        planned = plan_microbatches(train, step, run.computing, run.seconds, run.ledger)
        yield from _moves(run, planned, visited)
        visited.update(step_samples(train, step))


def _moves(run: Run, planned: Sequence[Microbatch], visited: set[SampleId]) -> Iterator[Move]:
    ledger, peers = run.ledger, set(run.peers)
    if ledger is None:
        return
    routes = routes_of(planned, run.computing)
    samples = [sample for sample in routes if sample not in visited]
    for sample, entry in zip(samples, ledger.entries(samples).tolist(), strict=True):
        ways = zip(ledger.boundaries, pairwise(routes[sample]), entry, strict=True)
        for boundary, way, numbers in ways:
            held = [ledger.holder(number) for number in numbers]
            lacking = tuple(new for new, old in zip(way, held, strict=True) if new != old)
            if lacking:
                holders = tuple(peer for peer in held if peer is not None and peer in peers)
                yield Move(sample=sample, boundary=boundary, lacking=lacking, holders=holders)


def _follows(run: Run, moves: Iterable[Move]) -> Iterator[tuple[PeerId, FollowBuffers]]:
    """Whom to tell what; who has a buffer is asked first for about as many as anybody else."""
    asked = run.hand_offs.asked
    loads: Counter[PeerId] = Counter()
    groups: dict[PeerId, dict[tuple[BlockIndex, tuple[PeerId, ...]], list[SampleId]]] = {}
    for move in moves:
        for peer in move.lacking:
            if (move.boundary, peer) in asked.get(move.sample, ()):
                continue
            sources = tuple(sorted(move.holders, key=lambda holder: loads[holder]))
            loads[sources[0]] += 1
            group = groups.setdefault(peer, {}).setdefault((move.boundary, sources), [])
            group.append(move.sample)
    for peer, wanted in groups.items():
        largest = sorted(wanted.items(), key=lambda item: -len(item[1]))[:MAX_TOLD]
        for (boundary, sources), samples in largest:
            yield (
                peer,
                FollowBuffers(
                    run_id=run.run_id,
                    attempt=run.attempt,
                    boundary=boundary,
                    samples=tuple(samples[:MAX_FOLLOWING]),
                    sources=sources,
                ),
            )


# ---- whether it is worth it


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """Between a hand-off to as many peers as lack a buffer, and a key frame."""

    num_lacking: int
    hand_off_bytes: int
    extra_bytes: int

    @classmethod
    def of(cls, run: Run, num_lacking: int) -> _Choice:
        train, channels = run.spec.train, run.spec.model.hidden_size
        return cls(
            num_lacking=num_lacking,
            hand_off_bytes=num_lacking * buffer_bytes(train, channels),
            extra_bytes=key_frame_extra_bytes(train, channels),
        )

    @property
    def is_hand_off(self) -> bool:
        return self.hand_off_bytes < self.extra_bytes

    @property
    def kind(self) -> str:
        return f"{'hand-off' if self.is_hand_off else 'key frame'} of {self.num_lacking}"

    def in_words(self, moves: Sequence[Move]) -> str:
        peers = list(dict.fromkeys(peer for move in moves for peer in move.lacking))
        others = f" and {len(peers) - MAX_NAMED} others" if len(peers) > MAX_NAMED else ""
        count = len({move.sample for move in moves})
        who = f"{count} sample{'s' * (count > 1)} to come to {', '.join(peers[:MAX_NAMED])}{others}"
        ends = "each" if self.num_lacking == 1 else "each, for both ends,"
        hand_off = f"a hand-off of {self.hand_off_bytes / 1e3:.1f} kB {ends}"
        key = f"a key frame ({self.extra_bytes / 1e3:.1f} kB more than a delta)"
        if self.is_hand_off:
            return f"{who}: {hand_off} is cheaper than {key}, so their buffers follow"
        return f"{who}: {key} is no dearer than {hand_off}, so they begin anew"
