"""Costs of a step, learned from the swarm's runs, and the load of other runs. Pure.

For each run the coordinator measures how long its steps took, on which stages, beside which other
runs. From its peers' measurements of their machines and links it computes what operations and bytes
alone would have taken. The difference is the overhead of a step, see `machines.step_cost`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.plan.forecast import Rates, crossing, stage_time
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.machines.step_cost import (
    Factors,
    Pipeline,
    StageWork,
    prior,
    reported_compute_s,
    step_cost,
    update_compute_cost,
    update_costs,
)
from swarm_ft.protocol.machines.step_time import Crossing, exchanged
from swarm_ft.protocol.messages.capacity import Costs, Machine
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.spec.flops import stage_flops
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.training_plan import casts_shadows, evaluates_at

LEAST_STEPS = 3
"""Steps of a run before its measurements are used."""
IDLE_PART = 0.4
"""Approximate ratio of other programs' demand beside working members to that beside idle ones: a
part of it is short tasks, and the kernel divides processors by groups.
"""
UNKNOWN_SHARE = 0.5
"""Assumed share of a peer's time that a run takes before its steps are measured."""


class PeerLoad(NamedTuple):
    """Load of other runs on a peer.

    Attributes:
        num_runs: Number of runs that it has a stage of.
        busy: Share of its time.
        host_busy: Cores of its machine that all peers there demand.
        host_load: Cores of its machine that other programs demand.
        left_s: Seconds until the last of these runs ends, as far as known.
        up_bytes_per_s, down_bytes_per_s: Bytes per second that these runs send and receive there.
    """

    num_runs: int = 0
    busy: float = 0.0
    host_busy: float = 0.0
    host_load: float = 0.0
    left_s: float = 0.0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0

    def share_link(self, machine: Machine) -> Machine:
        """Return the machine with the rates that its link has left for one more run.

        TCP shares a link about evenly, so one more run gets an equal part at least.
        """
        up, down = self.up_bytes_per_s, self.down_bytes_per_s
        return replace(
            machine,
            up_bytes_per_s=self._left(machine.up_bytes_per_s, up),
            down_bytes_per_s=self._left(machine.down_bytes_per_s, down),
        )

    def _left(self, bytes_per_s: float, used: float) -> float:
        return max(bytes_per_s / (1 + self.num_runs), bytes_per_s - used)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurements:
    """Measured steps of one run on the same stages.

    Attributes:
        stages: Stages of these steps.
        first: Pipeline of a step that meets its samples for the first time.
        later: Pipeline of a later step.
        num_first, num_later: Measured steps of each kind, without evaluations.
        seconds: Seconds of these steps together.
        committed_steps: Committed steps of the run at the last measurement.
        computed_s: Seconds per microbatch at each stage, as its peers reported; 0: unknown.
        num_looks: Number of samples in the mean load of other programs.
    """

    stages: tuple[Stage, ...]
    first: Pipeline
    later: Pipeline
    num_first: int = 0
    num_later: int = 0
    seconds: float = 0.0
    committed_steps: int = 0
    computed_s: tuple[float, ...] = ()
    num_looks: int = 0

    def beside(self, loads: Mapping[str, float]) -> RunMeasurements:
        """Return the measurements with one more sample of other programs' load."""
        looks = self.num_looks
        load = {
            name: (looks * self.first.load.get(name, 0.0) + new) / (looks + 1)
            for name, new in loads.items()
        }
        first, later = (replace(one, load=load) for one in (self.first, self.later))
        return replace(self, first=first, later=later, num_looks=looks + 1)

    @property
    def num_steps(self) -> int:
        """Number of measured steps."""
        return self.num_first + self.num_later

    def step_s(self, factors: Factors) -> float:
        """Return the model's seconds of the mean step."""
        seconds = 0.0
        for count, pipeline in ((self.num_first, self.first), (self.num_later, self.later)):
            if count:
                seconds += count * step_cost(pipeline, factors).seconds
        return seconds / self.num_steps

    def all_compute_s(self, factors: Factors) -> float:
        """Return the model's seconds of a microbatch at all stages with reports."""
        found = reported_compute_s(self.first, factors)
        return math.fsum(
            seconds
            for seconds, measured_s in zip(found, self.computed_s, strict=True)
            if measured_s
        )


def with_new_steps(
    before: RunMeasurements | None, state: SwarmState, run: Run, machines: Mapping[PeerId, Machine]
) -> RunMeasurements | None:
    """Return the measurements of a run with the newly committed steps; None without any.

    Args:
        before: Earlier measurements of the run.
        state: State of the swarm.
        run: Run to measure.
        machines: Measurements that members sent of their machines.
    """
    stages = run.computing
    peers = [peer for stage in stages for peer in stage.peers]
    is_known = bool(peers) and all(peer in machines for peer in peers)
    if not is_known or not run.measured.step_seconds:
        return before
    if before is None or before.stages != stages:
        around = {peer: load_on(state, machines, peer, run.run_id) for peer in peers}
        first, later = (
            pipeline(run.spec, stages, machines, around, is_first=one) for one in (True, False)
        )
        before = RunMeasurements(stages=stages, first=first, later=later)
    return _with_steps(before.beside(loads_of(machines, peers)), run)


def _with_steps(before: RunMeasurements, run: Run) -> RunMeasurements:
    """Add the newly committed steps, as many of them as are remembered."""
    train, committed = run.spec.train, run.past.committed_steps
    known = run.measured.step_seconds
    num_new = min(len(known), max(0, committed - before.committed_steps))
    num_first, num_later, seconds = before.num_first, before.num_later, before.seconds
    newest = zip(range(committed - num_new, committed), known[len(known) - num_new :], strict=True)
    for step, step_s in newest:
        if evaluates_at(train, StepNumber(step)) or casts_shadows(train, StepNumber(step)):
            continue
        is_first = step < train.steps_per_epoch
        num_first, num_later = num_first + is_first, num_later + (not is_first)
        seconds += step_s
    return replace(
        before,
        num_first=num_first,
        num_later=num_later,
        seconds=seconds,
        committed_steps=committed,
        computed_s=tuple(_computed_s(run, stage) for stage in before.stages),
    )


def _computed_s(run: Run, stage: Stage) -> float:
    rates = [
        median(run.measured.flops_per_s[peer])
        for peer in stage.peers
        if run.measured.flops_per_s.get(peer)
    ]
    return stage_flops(run.spec, stage.layers) / fmean(rates) if rates else 0.0


def costs_of(runs: Iterable[RunMeasurements]) -> Costs:
    """Return a step's costs as learned from these runs, the newest last."""
    costs = prior()
    for one in runs:
        if one.num_steps < LEAST_STEPS:
            continue
        costs = update_costs(costs, one.step_s, one.seconds / one.num_steps, one.num_steps)
        computed_s = math.fsum(one.computed_s)
        if computed_s:
            costs = update_compute_cost(costs, one.all_compute_s, computed_s)
    return costs


# ---- work of a step


def pipeline(
    spec: RunSpec,
    stages: Sequence[Stage],
    machines: Mapping[PeerId, Machine],
    around: Mapping[PeerId, PeerLoad],
    *,
    is_first: bool,
) -> Pipeline:
    """Return the work of a step, from its peers' measurements of their machines and links."""
    peers = [peer for stage in stages for peer in stage.peers]
    rates = _rates({peer: around[peer].share_link(machines[peer]) for peer in peers})
    names = {peer: machine_name(machines, peer) for peer in rates.up}
    return Pipeline(
        stages=tuple(
            StageWork(
                time=stage_time(spec, stages, index, rates, is_first=is_first),
                blocks=len(stage.layers),
                trained_bytes=spec.trained_bytes(stage.layers),
                frames=spec.num_frames(stage.layers.start) if index else 0,
                machines=tuple(names[peer] for peer in stage.peers),
                busy=fmean(_stretched(around[peer]) for peer in stage.peers),
            )
            for index, stage in enumerate(stages)
        ),
        num_microbatches=spec.train.batch_size // spec.train.micro_batch_size,
        control_s=2 * max(machines[peer].round_trip_s for peer in names),
        cores={name: machines[peer].cores for peer, name in names.items()},
        busy={name: around[peer].host_busy for peer, name in names.items()},
        load={name: around[peer].host_load for peer, name in names.items()},
    )


def _stretched(around: PeerLoad) -> float:
    """Return by how much a task at a peer slows down at this share of other runs."""
    if not around.num_runs:
        return 0.0
    return min(float(around.num_runs), around.busy / max(1e-3, 1 - around.busy))


def _rates(machines: Mapping[PeerId, Machine]) -> Rates:
    """Return the rates that peers measured against the coordinator."""
    flops_per_s = {peer: one.flops_per_s for peer, one in machines.items() if one.flops_per_s}
    return Rates(
        flops_per_s=flops_per_s,
        usual_flops_per_s=median(flops_per_s.values()) if flops_per_s else math.inf,
        up={peer: one.up_bytes_per_s or math.inf for peer, one in machines.items()},
        down={peer: one.down_bytes_per_s or math.inf for peer, one in machines.items()},
        links={},
        usual_way_s=fmean(one.round_trip_s for one in machines.values()) / 2,
        summed_bytes=0.0,
    )


# ---- other runs on the same machines


def load_on(
    state: SwarmState,
    machines: Mapping[PeerId, Machine],
    peer: PeerId,
    but: RunId | None = None,
) -> PeerLoad:
    """Return the load of other runs on a peer.

    Args:
        state: State of the swarm.
        machines: Measurements that members sent of their machines.
        peer: Name of a member.
        but: Run that does not count.
    """
    runs = [run for run in state.runs_of(peer) if run.run_id != but]
    host = _host(machines, peer)
    near = [
        (run, other)
        for run in state.active_runs
        for other in dict.fromkeys(run.peers)
        if run.run_id != but and (other == peer or (host and _host(machines, other) == host))
    ]
    traffic = [_traffic(run, peer) for run in runs]
    return PeerLoad(
        num_runs=len(runs),
        busy=min(1.0, math.fsum(_share(run, peer) for run in runs)),
        # While a peer computes for one run it requests nothing for another one.
        host_busy=math.fsum(
            _share(run, other) / (1 + len([one for one, at in near if at == other]))
            for run, other in near
        ),
        host_load=loads_of(machines, [peer]).get(machine_name(machines, peer), 0.0),
        left_s=max((_left_s(run) for run, _ in near), default=0.0),
        up_bytes_per_s=math.fsum(up for up, _ in traffic),
        down_bytes_per_s=math.fsum(down for _, down in traffic),
    )


def loads_of(machines: Mapping[PeerId, Machine], peers: Iterable[PeerId]) -> Mapping[str, float]:
    """Return the cores that other programs demand on these peers' machines, by machine.

    While members idle that is the number of running or waiting threads. While they work it is
    scaled: other programs' processor time is to their demand as members' processor time is to
    theirs. Some waiting threads are niced, and get little.
    """
    found = {}
    for name in {machine_name(machines, peer) for peer in peers}:
        reports = [one for peer, one in machines.items() if machine_name(machines, peer) == name]
        busy = fmean(one.busy for one in reports) if reports else 0.0
        if not busy:
            found[name] = 0.0
            continue
        uses = math.fsum(one.uses for one in reports)
        asks = uses + math.fsum(one.waits for one in reports)
        idle = IDLE_PART * max(0.0, fmean(one.demand for one in reports) - asks)
        working = asks * max(0.0, busy - uses) / uses if uses else 0.0
        share = min(1.0, uses / busy)
        found[name] = (1 - share) * idle + share * working
    return found


def machine_name(machines: Mapping[PeerId, Machine], peer: PeerId) -> str:
    """Return the name of a peer's machine; a peer on an unknown one has its own name."""
    return _host(machines, peer) or peer


def _host(machines: Mapping[PeerId, Machine], peer: PeerId) -> str:
    return machines[peer].host if peer in machines else ""


def _share(run: Run, peer: PeerId) -> float:
    """Return the share of a peer's time that a run takes."""
    rates, step_seconds = run.measured.flops_per_s.get(peer), run.measured.step_seconds
    stage = next((one for one in run.stages if peer in one.peers), None)
    if not rates or not step_seconds or stage is None:
        return UNKNOWN_SHARE
    microbatches = run.spec.train.batch_size // run.spec.train.micro_batch_size
    flops = stage_flops(run.spec, stage.layers) * microbatches / len(stage.peers)
    return min(1.0, flops / median(rates) / max(1e-6, median(step_seconds)))


def _traffic(run: Run, peer: PeerId) -> tuple[float, float]:
    """Return the bytes per second that a run sends and receives at a peer, in its present steps."""
    stages, step_seconds, train = run.computing, run.measured.step_seconds, run.spec.train
    index = next((number for number, one in enumerate(stages) if peer in one.peers), None)
    if index is None or not step_seconds:
        return 0.0, 0.0
    is_first = run.past.committed_steps < train.steps_per_epoch
    crossings = [
        crossing(run.spec, stage, is_first=is_first) if number else Crossing()
        for number, stage in enumerate(stages)
    ]
    microbatches = train.batch_size / train.micro_batch_size / len(stages[index].peers)
    step_s = max(1e-6, median(step_seconds))
    up_bytes, down_bytes = exchanged(crossings, index)
    return microbatches * up_bytes / step_s, microbatches * down_bytes / step_s


def _left_s(run: Run) -> float:
    """Return the seconds until a run ends; infinite if its steps were not measured."""
    left = run.spec.train.num_steps - run.past.all_steps
    step_seconds = run.measured.step_seconds
    return left * fmean(step_seconds) if step_seconds else math.inf


def left_s_range(step_seconds: Sequence[float], left: int) -> Iterator[float]:
    """Yield the least and the most seconds of so many steps at the pace of the last ones.

    The mean of a few steps is off by their spread; the peers' other work is unknown.
    """
    logs = [math.log(seconds) for seconds in step_seconds if seconds > 0]
    if not logs:
        return
    middle = fmean(logs)
    variance = math.fsum((one - middle) ** 2 for one in logs) / max(1, len(logs) - 1)
    factor = math.exp(1.645 * math.sqrt(variance / len(logs) + PACE_SPREAD**2))
    pace_s = fmean(step_seconds)
    yield left * pace_s / factor
    yield left * pace_s * factor


PACE_SPREAD = 0.1
"""Standard deviation of the logarithm of a run's pace, from its last steps to all later ones."""
