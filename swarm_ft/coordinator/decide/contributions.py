"""Contributions of members, by name, summed over commits; a rollback takes nothing away. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.events import ContributionRecord, Transition
from swarm_ft.coordinator.facts.state import PlannedStep, Run, SentTraffic
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.protocol.messages.contribution import Contribution, ContributionRequest
from swarm_ft.protocol.messages.control import FromPeer, PeerAlive

MAX_CONTRIBUTIONS = 4096
"""Members that are remembered; of more, those with the fewest samples are dropped."""


def credit(turn: Transition, run: Run, step: PlannedStep, committed: StepCommitted) -> None:
    """Count each peer's contribution to a step at its commit.

    Args:
        turn: Present transition.
        run: Run before the commit.
        step: Step with its peers' reports.
        committed: Result of the commit.
    """
    known = dict(turn.state.contributions)
    newest_sums = {
        peer: known.pop(peer, Contribution()) + one
        for peer, one in given_in(run, step, committed).items()
    }
    known.update(newest_sums)  # those who gave last come last
    ranked = sorted(known, key=lambda peer: known[peer].samples)
    room = max(0, len(known) - MAX_CONTRIBUTIONS)
    forgotten = tuple(peer for peer in ranked if peer not in newest_sums)[:room]
    for peer in forgotten:
        del known[peer]
    sent = {p: one for p, one in turn.state.sent_traffic.items() if p not in forgotten}
    turn.state = replace(
        turn.state,
        contributions=MappingProxyType(known),
        sent_traffic=MappingProxyType(sent) if forgotten else turn.state.sent_traffic,
    )
    newest = {peer: sent[peer] for peer in newest_sums if peer in sent}
    turn.write(ContributionRecord(newest_sums, forgotten, newest))


def count_sent(turn: Transition, peer_id: PeerId, message: FromPeer) -> None:
    """Count all bytes that a member sent in its session, as it reports; write nothing yet.

    The member reports the sum of its session each time, so nothing is lost if the coordinator ends
    before it writes the sum.
    """
    member, known = turn.state.members.get(peer_id), turn.state.sent_traffic
    if not isinstance(message, PeerAlive | ContributionRequest):
        return
    if member is None or not member.hello.session:
        return
    before = known.get(peer_id, SentTraffic())
    after = before.counted(member.hello.session, message.sent_bytes)
    if after != before:
        others = {peer: one for peer, one in known.items() if peer != peer_id}
        strangers = (peer for peer in others if peer not in turn.state.contributions)
        if len(others) >= 2 * MAX_CONTRIBUTIONS and (first := next(strangers, None)):
            del others[first]
        sent = MappingProxyType({**others, peer_id: after})
        turn.state = replace(turn.state, sent_traffic=sent)


def write_sent(turn: Transition, peer_id: PeerId) -> None:
    """Write the count of a leaving member's sent bytes."""
    sent = turn.state.sent_traffic.get(peer_id)
    if sent is not None:
        turn.write(ContributionRecord({}, (), {peer_id: sent}))


def given_in(
    run: Run, step: PlannedStep, committed: StepCommitted
) -> Mapping[PeerId, Contribution]:
    """Return each computing peer's contribution to a step: by routes, and by its own byte count."""
    return {
        peer: Contribution(
            samples=_num_samples(step, index, replica),
            steps=1,
            seconds=committed.seconds,
            compute_s=step.ready[peer].compute_s,
            sent_bytes=_sent_bytes(step, peer),
        )
        for index, stage in enumerate(run.computing)
        for replica, peer in enumerate(stage.peers)
    }


def _num_samples(step: PlannedStep, index: int, replica: int) -> int:
    passing = (b for b in step.microbatches if b.entry <= index and b.replica_at(index) == replica)
    return sum(len(batch.samples) for batch in passing)


def _sent_bytes(step: PlannedStep, peer: PeerId) -> int:
    ready = step.ready[peer]
    activations = sum(one.forward_bytes + one.backward_bytes for one in ready.traffic)
    return activations + ready.gradients.sent_bytes
