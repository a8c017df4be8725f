"""How long a step of a run takes on given stages, by what was measured of peers and links. Pure.

What a peer computes in a second it showed in this run, whatever layers it had; who has yet to show
it is taken to be as fast as most. Links are as fast as they were measured, or as peers lend them.
One that nobody measured was never full: what goes over it now bounds nothing, and more than that
takes as long as over any link that nobody knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.plan.lateness import UNMEASURED_BYTES_S
from swarm_ft.coordinator.plan.neighbours import bits_of, gradient_bytes
from swarm_ft.coordinator.plan.steps import FASTER_AT_MOST
from swarm_ft.ids import PeerId
from swarm_ft.protocol.machines.step_time import Crossing, StageTime, step_time
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.spec.codec_spec import CodecSpec, Direction
from swarm_ft.protocol.spec.flops import stage_flops
from swarm_ft.protocol.spec.run_spec import RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What is known of how fast peers compute, and their links are.

    Attributes:
        flops_per_s: of peers that showed it, each within what the others make credible.
        usual_flops_per_s: of all others.
        up: bytes a second that a peer sends, to whom it sends the fastest, where that is known.
        down: and receives.
        links: as they were measured, by who measured them and to whom they go.
        usual_way_s: of a link that nobody measured, one way.
        summed_bytes: that a peer sends to sum a step's gradients now, at most.
    """

    flops_per_s: Mapping[PeerId, float]
    usual_flops_per_s: float
    up: Mapping[PeerId, float]
    down: Mapping[PeerId, float]
    links: Mapping[PeerId, Mapping[PeerId, LinkSpeed]]
    usual_way_s: float
    summed_bytes: float

    def computes(self, peer: PeerId) -> float:
        """Operations a second."""
        return self.flops_per_s.get(peer) or self.usual_flops_per_s

    def sends(self, peer: PeerId) -> float:
        """Bytes a second; infinite if nobody knows."""
        return self.up.get(peer, math.inf)

    def receives(self, peer: PeerId) -> float:
        """Bytes a second; infinite if nobody knows."""
        return self.down.get(peer, math.inf)

    def hop_s(self, num_bytes: float, one: PeerId, other: PeerId) -> float:
        """That so many bytes take from one to another."""
        speed = self.links.get(one, {}).get(other, LinkSpeed())
        rate = min(self.sends(one), self.receives(other), speed.bytes_per_s or math.inf)
        return num_bytes / rate + (speed.least_round_trip_s / 2 or self.usual_way_s)

    def sum_s(self, num_bytes: float, peers: Sequence[PeerId]) -> float:
        """That replicas take to sum a step's gradients, each of which sends so many bytes."""
        known = [self.up[peer] for peer in peers if self.sends(peer) < math.inf]
        known_s = num_bytes / min(known, default=math.inf)
        is_new = max(0.0, num_bytes - self.summed_bytes)
        return known_s if len(known) == len(peers) else max(known_s, is_new / UNMEASURED_BYTES_S)


def rates_of(state: SwarmState, run: Run) -> Rates:
    """Of those who are there."""
    told = {
        peer: median(measured)
        for peer, measured in run.measured.flops_per_s.items()
        if measured and peer in state.members
    }
    carried = [rate for peer, rate in told.items() if state.carries(peer)]
    most = FASTER_AT_MOST * median_low(carried) if carried else math.inf
    credible = {peer: min(rate, most) for peer, rate in told.items()}
    links = {peer: member.links for peer, member in state.members.items()}
    speeds = [(to, speed) for measured in links.values() for to, speed in measured.items()]
    came = {peer: [speed for to, speed in speeds if to == peer] for peer in state.members}
    ways = [speed.least_round_trip_s / 2 for _, speed in speeds if speed.least_round_trip_s]
    hellos = {peer: member.hello for peer, member in state.members.items()}
    return Rates(
        flops_per_s=credible,
        usual_flops_per_s=median(credible.values()) if credible else math.inf,
        up={p: _rate(links[p].values(), hello.max_up_bytes_per_s) for p, hello in hellos.items()},
        down={p: _rate(came[p], hello.max_down_bytes_per_s) for p, hello in hellos.items()},
        links=links,
        usual_way_s=median(ways) if ways else 0.0,
        summed_bytes=max(_reduced_bytes(run.spec, stage) for stage in run.computing),
    )


def _rate(speeds: Iterable[LinkSpeed], cap: float) -> float:
    """The fastest that was measured, within what the peer lends."""
    fastest = max((one.bytes_per_s for one in speeds if one.bytes_per_s), default=math.inf)
    return min(fastest, cap or math.inf)


def step_s(spec: RunSpec, stages: Sequence[Stage], rates: Rates, *, is_first: bool) -> float:
    """Seconds of a step, at least.

    Args:
        spec: of the run.
        stages: first to last.
        rates: of their peers.
        is_first: whether its samples are met for the first time by these stages.
    """
    times = [
        stage_time(spec, stages, index, rates, is_first=is_first) for index in range(len(stages))
    ]
    return step_time(times, spec.train.batch_size // spec.train.micro_batch_size).seconds


def stage_time(
    spec: RunSpec, stages: Sequence[Stage], index: int, rates: Rates, *, is_first: bool
) -> StageTime:
    """Return what one of the stages, and the boundary in front of it, adds to a step."""
    stage, comes, hop_s = stages[index], Crossing(), (0.0, 0.0)
    if index:
        ahead, comes = stages[index - 1].peers, _crossing(spec, stage, is_first=is_first)
        ways = [(one, other) for one in ahead for other in stage.peers]
        forward_s = max(rates.hop_s(comes.forward, one, other) for one, other in ways)
        backward_s = max(rates.hop_s(comes.backward, other, one) for one, other in ways)
        hop_s = forward_s, backward_s if comes.backward else 0.0
    flops, speed = stage_flops(spec, stage.layers), sum(map(rates.computes, stage.peers))
    return StageTime(
        compute_s=flops * len(stage.peers) / speed,
        turn_s=flops / speed,
        comes=comes,
        hop_s=hop_s,
        up_bytes_per_s=sum(map(rates.sends, stage.peers)),
        down_bytes_per_s=sum(map(rates.receives, stage.peers)),
        reduced_s=rates.sum_s(_reduced_bytes(spec, stage), stage.peers),
    )


def _crossing(spec: RunSpec, stage: Stage, *, is_first: bool) -> Crossing:
    """Of a microbatch, over the boundary in front of a stage."""
    train, boundary = spec.train, stage.layers.start
    forward = train.codec(Direction.FORWARD)
    if is_first and forward.is_delta:
        forward = train.key_frame_codec(Direction.FORWARD)
    back = train.codec(Direction.BACKWARD) if spec.gradients_cross(boundary) else None
    return Crossing(_bytes(spec, forward), _bytes(spec, back) if back else 0.0)


def _bytes(spec: RunSpec, codec: CodecSpec) -> float:
    train = spec.train
    values = train.micro_batch_size * train.seq_length * spec.model.hidden_size
    return values * bits_of(codec) / 8


def _reduced_bytes(spec: RunSpec, stage: Stage) -> float:
    """That each replica sends to sum a step's gradients: in shares, and as the sum of its own."""
    times = 2 * (len(stage.peers) - 1) / len(stage.peers)
    return times * gradient_bytes(spec, stage.layers)
