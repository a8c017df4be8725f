"""Status of members, as `swarm-ft status` shows it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swarm_ft.coordinator.facts.connectivity import Connectivity, pair_of
from swarm_ft.coordinator.facts.state import Member, Run, SwarmState
from swarm_ft.coordinator.plan.routes import expected_s
from swarm_ft.identity.roles import Caller
from swarm_ft.ids import PeerId
from swarm_ft.protocol.machines.pipeline import PARTS
from swarm_ft.protocol.messages.capacity import LinkSpeed, Machine
from swarm_ft.protocol.messages.client import (
    MAX_CONTRIBUTORS,
    MAX_LINKS,
    Contributor,
    MemberActivity,
    MemberLink,
    MemberState,
    MemberStatus,
    MemberWork,
    RunPhase,
)
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.spec.bounds import MAX_HOSTED
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.transport.rules import may_read


@dataclass(frozen=True, slots=True)
class _Post:
    """A member's stage in a run, and its place among the stage's replicas.

    Attributes:
        share: Microbatches of the present step that it trains; `held_out` are only evaluated.
    """

    run: Run
    stages: tuple[Stage, ...]
    index: int
    replica: int
    share: int
    held_out: int

    @property
    def stage(self) -> Stage:
        return self.stages[self.index]


class Roll:
    """Status of all members, one after the other.

    Args:
        state: Present state.
        machines: Measurements that members sent of their machines.
        caller: Member that requests it; None: no member has keys.
    """

    def __init__(
        self, state: SwarmState, machines: Mapping[PeerId, Machine], caller: Caller | None
    ) -> None:
        self._state = state
        self._machines = machines
        self._caller = caller
        self._posts: dict[PeerId, list[_Post]] = {}
        for run in _staffed_runs(state):
            for peer, post in _posts(run):
                self._posts.setdefault(peer, []).append(post)

    def status(self, member: Member, idle: str) -> MemberStatus:
        """Return the status of a member, with the text of its reason to be idle."""
        hello, state = member.hello, self._state
        peer, posts = hello.peer_id, self._posts.get(hello.peer_id, [])
        links = {link.peer_id: link for post in posts for link in _links(post, member, state.ways)}
        return MemberStatus(
            peer_id=peer,
            layers=hello.layers,
            idle=idle,
            grant=member.grant,
            endpoint=hello.endpoint if self._may_know(peer, posts) else "",
            device=hello.device,
            memory_bytes=hello.memory_bytes,
            version=hello.version,
            speaks=hello.protocol_version,
            joined_ago_s=max(0.0, state.seen_at_s - member.joined_at_s),
            heard_ago_s=max(0.0, state.seen_at_s - member.heard_at_s),
            machine=self._machines.get(peer, Machine()),
            works=tuple(_work(post, peer) for post in posts[:MAX_HOSTED]),
            links=tuple(links.values())[:MAX_LINKS],
            given=state.contribution_of(peer),
            state=_state_of(member, is_working=bool(posts)),
            offered_bytes=member.offered_bytes or hello.memory_bytes,
        )

    def _may_know(self, peer: PeerId, posts: Sequence[_Post]) -> bool:
        """Whether the caller is the member, or may read one of its runs."""
        caller = self._caller
        if caller is None or caller.name == peer:
            return True
        runs = (post.run for post in posts)
        return any(may_read(caller, run.owner, run.spec.train.readers) for run in runs)


def _state_of(member: Member, *, is_working: bool) -> MemberState:
    if member.leaving is None:
        return MemberState.WORKING if is_working else MemberState.IDLE
    if not member.leaving.stays:
        return MemberState.LEAVING
    return MemberState.PAUSING if is_working else MemberState.PAUSED


def contributors(state: SwarmState) -> tuple[Contributor, ...]:
    """Return contributions, the largest first."""
    ranked = sorted(state.contributions.items(), key=lambda one: -one[1].samples)
    return tuple(
        Contributor(peer_id=peer, given=state.contribution_of(peer))
        for peer, _ in ranked[:MAX_CONTRIBUTORS]
    )


def _staffed_runs(state: SwarmState) -> Iterator[Run]:
    """Yield runs that have peers; active ones first."""
    manned = [r for r in state.runs.values() if r.attempt.assignments]
    yield from (run for run in manned if not run.phase.is_over)
    yield from (run for run in manned if run.phase is RunPhase.FINISHED)


def _posts(run: Run) -> Iterator[tuple[PeerId, _Post]]:
    stages, step = run.stages, run.step
    shares = _shares(run, step.microbatches if step else ())
    held_out = _shares(run, step.evaluation if step else ())
    for index, stage in enumerate(stages):
        for replica, peer in enumerate(stage.peers):
            yield peer, _Post(run, stages, index, replica, shares[peer], held_out[peer])


def _shares(run: Run, batches: Sequence[Microbatch]) -> Counter[PeerId]:
    """Count the microbatches of each peer in this attempt."""
    return Counter(
        stage.peers[batch.replica_at(index)]
        for index, stage in enumerate(run.computing if batches else ())
        for batch in batches
        if batch.is_to_do(index) and batch.replica_at(index) < len(stage.peers)
    )


def _work(post: _Post, peer: PeerId) -> MemberWork:
    run, awaited = post.run, post.run.attempt.awaited
    seconds = run.measured.seconds.get(peer, ())
    num_parts = PARTS * post.share + post.held_out
    return MemberWork(
        run_id=run.run_id,
        layers=post.stage.layers,
        stage=post.index,
        replica=post.replica,
        num_replicas=len(post.stage.peers),
        doing=_doing(run, peer),
        waits_for=tuple(sorted(awaited.waits_for.get(peer, ()))),
        share=post.share,
        parts_begun=min(awaited.parts_begun.get(peer, 0), num_parts),
        num_parts=num_parts,
        microbatch_s=expected_s(seconds) if seconds else None,
    )


def _doing(run: Run, peer: PeerId) -> MemberActivity:
    if run.phase is RunPhase.FINISHED:
        return MemberActivity.KEEPING
    if peer in run.listeners:
        return MemberActivity.JOINING
    if run.phase is RunPhase.WAITING or peer in run.attempt.awaited.waits_for:
        return MemberActivity.WAITING
    if run.phase is RunPhase.LOADING:
        return MemberActivity.READY if peer in run.attempt.loaded else MemberActivity.LOADING
    if run.phase is RunPhase.EXPORTING:
        return MemberActivity.READY if peer in run.past.exported else MemberActivity.EXPORTING
    is_ready = run.step is None or peer in run.step.ready
    return MemberActivity.READY if is_ready else MemberActivity.COMPUTING


def _links(post: _Post, member: Member, ways: Connectivity) -> Iterator[MemberLink]:
    """Yield links to its stage's replicas, which sum gradients with it, and to adjoining stages."""
    peer = member.hello.peer_id
    if not (ways.met or member.links):
        return
    for stage in post.stages[max(0, post.index - 1) : post.index + 2]:
        for other in stage.peers:
            way = ways.met.get(pair_of(peer, other)) if ways.met else None
            speed = member.links.get(other)
            if other != peer and (way is not None or speed is not None):
                yield MemberLink(peer_id=other, way=way, speed=speed or LinkSpeed())
