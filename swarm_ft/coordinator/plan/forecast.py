"""Time of a run's step on given stages, from measurements of peers and links. Pure.

A peer's speed is what it showed in this run, on any layers; a peer without measurements counts as
fast as most. A link's speed is its measurement, or the limit that the peer sets. A link that nobody
measured was never full: its present traffic bounds nothing, and additional traffic takes as long as
over any unmeasured link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from swarm_ft.codec.spec import CodecSpec, Direction
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.plan.lateness import UNMEASURED_BYTES_S
from swarm_ft.coordinator.plan.neighbours import gradient_bytes
from swarm_ft.coordinator.plan.steps import FASTER_AT_MOST
from swarm_ft.ids import PeerId
from swarm_ft.protocol.machines.step_time import Crossing, StageTime, step_time
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.spec.flops import stage_flops
from swarm_ft.protocol.spec.run_spec import RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Known speeds of peers and their links.

    Attributes:
        flops_per_s: Operations per second of measured peers, each within a credible range of the
            others.
        usual_flops_per_s: Operations per second assumed of all others.
        up: Bytes per second of each peer's fastest outgoing link, where known.
        down: Bytes per second of each peer's fastest incoming link, where known.
        links: Measured links, by the measuring peer and the other end.
        usual_way_s: Seconds one way over a link that nobody measured.
        summed_bytes: Most bytes that a peer sends now to sum a step's gradients.
    """

    flops_per_s: Mapping[PeerId, float]
    usual_flops_per_s: float
    up: Mapping[PeerId, float]
    down: Mapping[PeerId, float]
    links: Mapping[PeerId, Mapping[PeerId, LinkSpeed]]
    usual_way_s: float
    summed_bytes: float

    def computes(self, peer: PeerId) -> float:
        """Return a peer's operations per second."""
        return self.flops_per_s.get(peer) or self.usual_flops_per_s

    def sends(self, peer: PeerId) -> float:
        """Return a peer's outgoing bytes per second; infinite if unknown."""
        return self.up.get(peer, math.inf)

    def receives(self, peer: PeerId) -> float:
        """Return a peer's incoming bytes per second; infinite if unknown."""
        return self.down.get(peer, math.inf)

    def hop_s(self, num_bytes: float, one: PeerId, other: PeerId) -> float:
        """Return the seconds that so many bytes take from one peer to another."""
        speed = self.links.get(one, {}).get(other, LinkSpeed())
        rate = min(self.sends(one), self.receives(other), speed.bytes_per_s or math.inf)
        return num_bytes / rate + (speed.least_round_trip_s / 2 or self.usual_way_s)

    def sum_s(self, num_bytes: float, peers: Sequence[PeerId]) -> float:
        """Return the seconds in which replicas sum gradients, if each sends so many bytes."""
        known = [self.up[peer] for peer in peers if self.sends(peer) < math.inf]
        known_s = num_bytes / min(known, default=math.inf)
        is_new = max(0.0, num_bytes - self.summed_bytes)
        return known_s if len(known) == len(peers) else max(known_s, is_new / UNMEASURED_BYTES_S)


def rates_of(state: SwarmState, run: Run) -> Rates:
    """Return the rates of a run's connected peers."""
    measured_rates = {
        peer: median(measured)
        for peer, measured in run.measured.flops_per_s.items()
        if measured and peer in state.members
    }
    carried = [rate for peer, rate in measured_rates.items() if state.may_host_alone(peer)]
    most = FASTER_AT_MOST * median_low(carried) if carried else math.inf
    credible = {peer: min(rate, most) for peer, rate in measured_rates.items()}
    links = {peer: member.links for peer, member in state.members.items()}
    speeds = [(to, speed) for measured in links.values() for to, speed in measured.items()]
    incoming = {peer: [speed for to, speed in speeds if to == peer] for peer in state.members}
    ways = [speed.least_round_trip_s / 2 for _, speed in speeds if speed.least_round_trip_s]
    hellos = {peer: member.hello for peer, member in state.members.items()}
    return Rates(
        flops_per_s=credible,
        usual_flops_per_s=median(credible.values()) if credible else math.inf,
        up={p: _rate(links[p].values(), hello.max_up_bytes_per_s) for p, hello in hellos.items()},
        down={p: _rate(incoming[p], hello.max_down_bytes_per_s) for p, hello in hellos.items()},
        links=links,
        usual_way_s=median(ways) if ways else 0.0,
        summed_bytes=max(_reduced_bytes(run.spec, stage) for stage in run.computing),
    )


def _rate(speeds: Iterable[LinkSpeed], cap: float) -> float:
    """Return the fastest measured rate, within the peer's limit."""
    fastest = max((one.bytes_per_s for one in speeds if one.bytes_per_s), default=math.inf)
    return min(fastest, cap or math.inf)


def step_s(spec: RunSpec, stages: Sequence[Stage], rates: Rates, *, is_first: bool) -> float:
    """Return the least seconds of a step.

    Args:
        spec: RunSpec of the run.
        stages: Stages, first to last.
        rates: Rates of their peers.
        is_first: Whether these stages meet its samples for the first time.
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
        ahead, comes = stages[index - 1].peers, crossing(spec, stage, is_first=is_first)
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


def crossing(spec: RunSpec, stage: Stage, *, is_first: bool) -> Crossing:
    """Return the bytes of a microbatch over the boundary in front of a stage."""
    train, boundary = spec.train, stage.layers.start
    forward = train.codec(Direction.FORWARD)
    if is_first and forward.is_delta:
        forward = train.key_frame_codec(Direction.FORWARD)
    back = train.codec(Direction.BACKWARD) if spec.gradients_cross(boundary) else None
    return Crossing(_bytes(spec, forward), _bytes(spec, back) if back else 0.0)


def _bytes(spec: RunSpec, codec: CodecSpec) -> float:
    train = spec.train
    values = train.micro_batch_size * train.seq_length * spec.model.hidden_size
    return values * codec.nominal_bits / 8


def _reduced_bytes(spec: RunSpec, stage: Stage) -> float:
    """Return the bytes that each replica sends to sum a step's gradients, in both phases."""
    times = 2 * (len(stage.peers) - 1) / len(stage.peers)
    return times * gradient_bytes(spec, stage.layers)
