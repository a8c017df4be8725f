"""Forecast of a job's duration, traffic and energy, made before anything starts. Pure.

A pipeline bounds every step from below: one microbatch passes all stages forward and backward, and
each further one follows at the pace of the slowest stage or link. Peers have measured their speeds
and links; a missing measurement bounds nothing and is reported. The swarm learns the remaining cost
of a step from its runs, see `machines.step_cost`; therefore seconds are a range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from statistics import mean

import torch
from rich.filesize import decimal

from swarm_ft.codec import from_spec
from swarm_ft.codec.spec import CodecSpec, Direction, parse_codec_spec
from swarm_ft.ids import PeerId
from swarm_ft.protocol.machines.pipeline import min_microbatches
from swarm_ft.protocol.machines.step_cost import (
    Factors,
    Limit,
    Pipeline,
    SecondsRange,
    StageWork,
    StepCost,
    bare,
    expected_range,
    factors_of,
    forward_turn_s,
    step_cost,
)
from swarm_ft.protocol.machines.step_time import Bound, Crossing, StageTime, exchanged
from swarm_ft.protocol.messages.capacity import Costs, Placed, PlacedPeer
from swarm_ft.protocol.messages.enrolment import name_lookup
from swarm_ft.protocol.spec.flops import FORWARD_PART, all_flops, num_outputs, stage_flops
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.quality import num_measured
from swarm_ft.protocol.spec.run_spec import BYTES_PER_FLOAT, RunSpec
from swarm_ft.protocol.spec.sample_rows import counts_of, rows_in
from swarm_ft.protocol.spec.training_plan import num_evaluations
from swarm_ft.stage.rehearsal import StageMemory

UNCOMPRESSED = parse_codec_spec("none", Direction.FORWARD)
PROBED_TOKENS, PROBED_CHANNELS = 64, 1024
"""Shape of the noise whose encoding measures a codec's bytes per value."""
PROBED_SAMPLES = 1000
"""Samples, at most, whose mean length stands for that of all samples."""
FRAME_BYTES = 64
"""Bytes of a frame around its payload: numbers and lengths, HTTP/2, TLS."""
MAX_EVAL_OVERLAP = 0.5
"""Largest share of evaluation time that fits into stages' idle time, as seen on shared machines."""
OTHER_RUNS_SPREAD = 0.15
"""Relative uncertainty of the slowdown by other runs on the same peers (log scale)."""
LOAD_SPREAD = 0.25
"""Relative uncertainty of the slowdown by other programs on the peers' machines (log scale)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """Memory that one replica of a stage needs, in bytes of tensors.

    Attributes:
        static: Bytes that do not depend on microbatches: weights, gradients, optimizer state.
        microbatch: Bytes that each microbatch adds.
        microbatches: Number of microbatches in memory at once.
        temporaries: Bytes of one task's intermediate values, on top of the above.
        total: Sum of all parts.
    """

    static: int
    microbatch: int
    microbatches: int
    temporaries: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageForecast:
    """Forecast for one stage.

    Attributes:
        layers: Blocks of the stage.
        peers: Ids of the replicas.
        memory: Memory of each replica; None without a rehearsal of the stage.
        compute_s: Seconds of one microbatch, forward and backward, at the mean replica.
        up_bytes: Bytes that each replica sends in the whole run.
        down_bytes: Bytes that each replica receives in the whole run.
        names: Names of the replicas for people.
    """

    layers: LayerRange
    peers: tuple[PeerId, ...]
    memory: PeerMemory | None
    compute_s: float
    up_bytes: float
    down_bytes: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalForecast:
    """Forecast for all evaluations, or for all shadow microbatches; no other field includes them.

    Attributes:
        times: Number of evaluations if the run does not stop early.
        samples: Samples of one evaluation; a second pass counts them again.
        sent_bytes: Bytes over all boundaries in the whole run.
        seconds: Seconds of all evaluations, with nothing hidden in stages' idle time.
    """

    times: int
    samples: int
    sent_bytes: float
    seconds: float

    def line(self, what: str) -> str:
        """Return one line for people."""
        return (
            f"{what:<9} {self.times} times on {self.samples} samples: sends "
            f"{decimal(round(self.sent_bytes))} and takes up to {self.seconds:.3g} s in all"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Forecast of a job.

    Attributes:
        stages: Stages, first to last.
        first_step_s: Seconds of a step while samples are visited for the first time.
        step_s: Seconds of a later step; it skips frozen first stages whose outputs are cached.
        seconds: Seconds of all steps.
        seconds_range: Range that holds nine of ten runs, evaluations included.
        samples_per_s: Mean speed.
        samples_range: Slowest and fastest speed within `seconds_range`.
        num_learned: Number of the swarm's runs whose measured step costs went into the forecast.
        bound_by: Slowest part of the pipeline, for people; no step can be faster.
        kwh: Energy of the machines whose power draw is known.
        evaluation: Evaluations of held-out samples; None without evaluations.
        shadows: Shadow microbatches; None if the job sets no quality.
        unknown: Missing measurements that the forecast leaves out, for people.
        shared: Peers that share a machine or train other runs, for people.
        num_waiting: Queued runs that start before this one.
        starts_after_s: Seconds until these peers have room for the job; 0 if they have it now.
    """

    stages: tuple[StageForecast, ...]
    first_step_s: float
    step_s: float
    seconds: float
    seconds_range: SecondsRange
    samples_per_s: float
    samples_range: tuple[float, float]
    bound_by: str
    kwh: float
    evaluation: EvalForecast | None
    shadows: EvalForecast | None
    unknown: tuple[str, ...]
    shared: tuple[str, ...] = ()
    num_learned: int = 0
    num_waiting: int = 0
    starts_after_s: float = 0.0

    def line(self) -> str:
        """Return the range of the speed and of the time in one line, for people."""
        low, high = self.samples_range
        first, later = f"{self.first_step_s:.3g} s/step", f"{self.step_s:.3g} s/step"
        steps = first if first == later else f"{first} at first, then {later}"
        return (
            f"forecast  {low:.3g} to {high:.3g} samples/s, "
            f"{duration_words(self.seconds_range.low, self.seconds_range.high)} "
            f"(about {steps}); slowest: {self.bound_by}"
        )

    def lines(self) -> Iterator[str]:
        """Yield the line of `line`, then one for each other part of the forecast."""
        yield self.line()
        for words in self.shared:
            yield f"shared    {words}"
        if self.num_waiting:
            runs = "1 run is" if self.num_waiting == 1 else f"{self.num_waiting} runs are"
            yield f"queue     {runs} queued before this one"
        if self.starts_after_s:
            after = duration_words(self.starts_after_s)
            yield f"start     in about {after}, once other runs have ended"
        if not self.num_learned:
            yield "range     wide, because this swarm has not measured a run yet"
        if self.evaluation is not None:
            yield self.evaluation.line("evaluation")
        if self.shadows is not None:
            yield self.shadows.line("shadows")


def duration_words(low_s: float, high_s: float | None = None) -> str:
    """Return a duration, or a range of it, with the unit that suits its longer end."""
    high_s = low_s if high_s is None else high_s
    unit_s, unit = (
        (3600.0, "h") if high_s >= 6000 else (60.0, "min") if high_s >= 100 else (1.0, "s")
    )
    low, high = (f"{seconds / unit_s:.2g}" for seconds in (low_s, high_s))
    return f"{high} {unit}" if low == high else f"{low} to {high} {unit}"


def placed_forecast(
    spec: RunSpec,
    placed: Placed,
    memory: Mapping[LayerRange, StageMemory | None] | None = None,
) -> Forecast:
    """Forecast a job on the placement that a coordinator reports.

    Args:
        spec: The job.
        placed: The coordinator's reply: peers, learned costs and queue.
        memory: Memory of stages, see `forecast`.
    """
    names = name_lookup(placed.names)
    found = forecast(spec, placed.peers, memory, placed.costs, placed.beside_s, names)
    return replace(found, num_waiting=placed.num_waiting, starts_after_s=placed.starts_after_s)


def forecast(
    spec: RunSpec,
    placed: Sequence[PlacedPeer],
    memory: Mapping[LayerRange, StageMemory | None] | None = None,
    costs: Costs | None = None,
    other_runs_s: float = math.inf,
    name_of: Callable[[str], str] = str,
) -> Forecast:
    """Forecast a job on these peers.

    Args:
        spec: The job.
        placed: Hosting peers, first stage to last; replicas of a stage are neighbours.
        memory: Memory of stages that were rehearsed, see `stage.rehearsal`.
        costs: Learned costs of a step beside operations and bytes; None makes every step a lower
            bound.
        other_runs_s: Seconds for which other runs on these peers go on.
        name_of: Function from a peer's id to its name for people.
    """
    costs = costs or bare()
    stages = _stages(spec, map(_on_shared_link, placed))
    train, factors = spec.train, factors_of(costs)
    work = _Work(spec, stages, _stages(spec, placed), other_runs_s)
    later = stages[_entry(spec, stages) :]
    step = step_cost(work.later, factors)
    seconds, seconds_range = work.seconds(factors), work.range(costs)
    num_samples = min(train.num_steps * train.batch_size, _visits(spec))
    watts = sum(peer.machine.watts for peer in placed)
    return Forecast(
        stages=tuple(
            _stage_forecast(spec, stages, index, memory or {}, factors, name_of)
            for index in range(len(stages))
        ),
        first_step_s=step_cost(work.first, factors).seconds,
        step_s=step.seconds,
        seconds=seconds,
        seconds_range=seconds_range,
        samples_per_s=num_samples / seconds if seconds else 0.0,
        samples_range=(
            num_samples / seconds_range.high if seconds else 0.0,
            num_samples / seconds_range.low if seconds else 0.0,
        ),
        bound_by=_bound_words(later, step, name_of),
        kwh=watts * seconds / 3.6e6,
        evaluation=_evaluation(spec, stages, factors),
        shadows=_shadows(spec, stages, factors),
        unknown=tuple(_unknown(placed)),
        shared=tuple(_shared(placed, name_of)),
        num_learned=costs.num_runs,
    )


def _shared(placed: Sequence[PlacedPeer], name_of: Callable[[str], str]) -> Iterator[str]:
    """Name the peers that share cores, and those that train other runs."""
    on_host: dict[str, list[PlacedPeer]] = {}
    for peer in placed:
        if peer.machine.host:
            on_host.setdefault(peer.machine.host, []).append(peer)
    for peers in on_host.values():
        if len(peers) > 1:
            names = " and ".join(name_of(peer.peer_id) for peer in peers)
            room = min(peer.machine.cores for peer in peers)
            cores = f", which computes for {room:.2g} of them at once" if room else ""
            yield f"{names} share one machine{cores}"
    for peer in placed:
        if peer.num_runs:
            runs = "1 other run" if peer.num_runs == 1 else f"{peer.num_runs} other runs"
            share = 100 * min(1.0, peer.busy)
            yield f"{name_of(peer.peer_id)} spends {share:.0f} % of its time on {runs}"


def with_mean_length(spec: RunSpec, samples: Sequence[bytes]) -> RunSpec:
    """Return the job with `seq_length` replaced by the mean length of its samples.

    Args:
        spec: The job.
        samples: Rows of the job; at most `PROBED_SAMPLES` of them are read.
    """
    some = samples[:: -(-len(samples) // PROBED_SAMPLES)]
    lengths = counts_of(rows_in(some, spec.train.seq_length)).lengths
    return replace(spec, train=replace(spec.train, seq_length=round(mean(lengths))))


def _visits(spec: RunSpec) -> float:
    train = spec.train
    return train.num_samples * train.num_steps / train.steps_per_epoch


def _unknown(placed: Sequence[PlacedPeer]) -> Iterable[str]:
    for what, values in (
        ("their compute speed", [peer.machine.flops_per_s for peer in placed]),
        ("their link speed", [peer.machine.up_bytes_per_s for peer in placed]),
        ("their power draw (--watts)", [peer.machine.watts for peer in placed]),
    ):
        silent = values.count(0.0)
        if silent:
            yield f"{silent} of {len(placed)} peers did not report {what}"


# ---- a stage


def _on_shared_link(peer: PlacedPeer) -> PlacedPeer:
    """Return the peer with the rates that its link leaves beside other runs."""
    machine = replace(
        peer.machine,
        up_bytes_per_s=peer.shared_up_bytes_per_s or peer.machine.up_bytes_per_s,
        down_bytes_per_s=peer.shared_down_bytes_per_s or peer.machine.down_bytes_per_s,
    )
    return replace(peer, machine=machine)


def _stages(spec: RunSpec, placed: Iterable[PlacedPeer]) -> list[_Stage]:
    return [_Stage(spec, tuple(group)) for _, group in groupby(placed, lambda one: one.layers)]


class _Stage:
    """A stage with its replicas, which share its microbatches equally."""

    def __init__(self, spec: RunSpec, peers: tuple[PlacedPeer, ...]) -> None:
        self.peers = peers
        self.layers = peers[0].layers
        self._machines = [peer.machine for peer in peers]
        self.trained_bytes = spec.trained_bytes(self.layers) + _ends_bytes(spec, self.layers)
        self._comes = {
            is_first: _boundary_bytes(spec, self.layers.start, is_first=is_first)
            for is_first in (True, False)
        }
        self._flops = stage_flops(spec, self.layers)
        self._forward_flops = FORWARD_PART * all_flops(spec, self.layers)

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the replicas' machines; an unknown machine is named after its peer."""
        return tuple(peer.machine.host or peer.peer_id for peer in self.peers)

    @property
    def busy(self) -> float:
        """Share of the mean replica's time that other runs take."""
        return mean(peer.busy for peer in self.peers)

    @property
    def compute_s(self) -> float:
        """Seconds of one microbatch, forward and backward, at the mean replica."""
        return self._seconds(self._flops)

    def comes(self, *, is_first: bool) -> Crossing:
        """Return the bytes of one microbatch over the boundary in front of the stage."""
        return self._comes[is_first]

    @property
    def forward_s(self) -> float:
        """Seconds of one microbatch that is only evaluated."""
        return self._seconds(self._forward_flops)

    def _seconds(self, flops: float) -> float:
        speeds = [m.flops_per_s for m in self._machines if m.flops_per_s]
        return flops / (sum(speeds) / len(speeds)) if speeds else 0.0

    @property
    def turn_s(self) -> float:
        """Seconds between two microbatches, all replicas working in parallel."""
        return self.compute_s / len(self.peers)

    @property
    def up_bytes_per_s(self) -> float:
        """Bytes a second that all replicas together can send."""
        return sum(m.up_bytes_per_s or math.inf for m in self._machines)

    @property
    def down_bytes_per_s(self) -> float:
        """Bytes a second that all replicas together can receive."""
        return sum(m.down_bytes_per_s or math.inf for m in self._machines)

    @property
    def round_trip_s(self) -> float:
        """Longest round trip of a replica to the coordinator, in seconds."""
        return max(m.round_trip_s for m in self._machines)

    @property
    def slowest_up(self) -> float:
        """Bytes a second of the slowest uplink among the replicas."""
        return min(m.up_bytes_per_s or math.inf for m in self._machines)

    def hop_s(self, num_bytes: float, to: _Stage) -> float:
        """Return the seconds of one transfer to a replica of another stage.

        Peers measure only their round trip to the coordinator. The delay between two peers is
        therefore estimated as a quarter of the sum of both round trips.
        """
        rate = min(self.slowest_up, *(m.down_bytes_per_s or math.inf for m in to._machines))
        return num_bytes / rate + (self.round_trip_s + to.round_trip_s) / 4


def _ends_bytes(spec: RunSpec, layers: LayerRange) -> float:
    """Return the bytes of trained embeddings and head in these layers."""
    model, train, trained = spec.model, spec.train, spec.trained_layers
    embeds = trained.start == 0 and not train.adapts
    tells = trained.stop == model.num_blocks and (train.has_classes or not train.adapts)
    ends = (
        (model.vocab_size, layers.start == 0, embeds),
        (num_outputs(spec), layers.stop == model.num_blocks, tells),
    )
    rows = sum(count for count, is_here, trains in ends if is_here and trains)
    return rows * model.hidden_size * BYTES_PER_FLOAT


# ---- bytes


@cache
def bytes_per_value(spec: CodecSpec) -> float:
    """Return the bytes per value of a codec, measured on Gaussian noise.

    Noise has no preferred directions. For directional codecs the result is the usual rate on
    activations instead.
    """
    if spec.is_directional:
        return spec.nominal_bits / 8
    noise = torch.randn(PROBED_TOKENS, PROBED_CHANNELS, generator=torch.Generator().manual_seed(0))
    base = torch.zeros_like(noise) if spec.is_delta else None
    return len(from_spec(spec).encode(noise, base).payload) / noise.numel()


def _entry(spec: RunSpec, stages: Sequence[_Stage]) -> int:
    """Return the index of the first stage that later visits of a sample pass; 0 without caches."""
    return spec.first_uncached_stage(stage.layers for stage in stages)


def _boundary_bytes(spec: RunSpec, boundary: int, *, is_first: bool) -> Crossing:
    """Return the bytes of a microbatch over a boundary, at the first visit or at a later one."""
    train = spec.train
    forward = train.codec(Direction.FORWARD)
    if is_first and forward.is_delta:
        forward = train.key_frame_codec(Direction.FORWARD)
    if spec.is_cacheable(boundary):
        forward = train.constant_codec
    backward = train.codec(Direction.BACKWARD) if spec.gradients_cross(boundary) else None
    return Crossing(
        _frames_bytes(spec, forward), _frames_bytes(spec, backward) if backward else 0.0
    )


def _frames_bytes(spec: RunSpec, codec: CodecSpec) -> float:
    """Return the bytes of one microbatch's frames with a codec."""
    train = spec.train
    values = train.seq_length * spec.model.hidden_size
    return train.micro_batch_size * (values * bytes_per_value(codec) + FRAME_BYTES)


def _reduced_bytes(spec: RunSpec, stages: Sequence[_Stage], stage: _Stage) -> float:
    """Return the bytes that each replica sends to sum a step's gradients.

    All gradients of the stage are summed over its replicas. Gradients of weights that several
    stages share are summed again over one replica of each of these stages.
    """
    rate = bytes_per_value(spec.train.reduction_codec)
    of_replicas = rate * stage.trained_bytes / BYTES_PER_FLOAT
    sharing = spec.sharing(stages)
    of_stages = spec.shared_values * BYTES_PER_FLOAT if stage in sharing else 0.0
    return _times(len(stage.peers)) * of_replicas + _times(len(sharing)) * of_stages


def _times(members: int) -> float:
    """Return how often each member of a sum sends its gradient (reduce-scatter and all-gather)."""
    return 2 * (members - 1) / members if members else 0.0


# ---- a step


class _Work:
    """Work of all steps of a job on given stages.

    Args:
        spec: The job.
        stages: Stages on links that other runs share.
        alone: The same stages on links without other runs.
        beside_s: Seconds for which the other runs go on.
    """

    def __init__(
        self, spec: RunSpec, stages: Sequence[_Stage], alone: Sequence[_Stage], beside_s: float
    ) -> None:
        train = spec.train
        self._beside_s = beside_s
        self._num_first = min(train.num_steps, train.steps_per_epoch)
        self._num_later = train.num_steps - self._num_first
        self._spec, self._stages = spec, stages
        self.first = _pipeline(spec, stages, is_first=True)
        self.later = _pipeline(spec, stages[_entry(spec, stages) :], is_first=False)
        self._first_alone = _pipeline(spec, alone, is_first=True).alone
        self._later_alone = _pipeline(spec, alone[_entry(spec, alone) :], is_first=False).alone

    def seconds(self, factors: Factors) -> float:
        """Return the seconds of all steps; other runs slow them as long as these go on."""
        beside_s = self._all_s(factors, self.first, self.later)
        if beside_s <= self._beside_s or not beside_s:
            return beside_s
        done = self._beside_s / beside_s
        return self._beside_s + (1 - done) * self._all_s(
            factors, self._first_alone, self._later_alone
        )

    def range(self, costs: Costs) -> SecondsRange:
        """Return the range of seconds; its upper end has all evaluations and shadows."""
        factors = factors_of(costs)
        with_others_s = self._all_s(factors, self.first, self.later)
        alone_s = self._all_s(factors, self._first_alone, self._later_alone)
        quiet_s = self._all_s(factors, self._first_alone.quiet, self._later_alone.quiet)
        spread = 0.0
        if quiet_s:
            by_runs = OTHER_RUNS_SPREAD * math.log(with_others_s / alone_s)
            spread = math.hypot(by_runs, LOAD_SPREAD * math.log(alone_s / quiet_s))
        least, middle, most = (
            expected_range(costs, partial(self._with_evaluations_s, part), spread)
            for part in (MAX_EVAL_OVERLAP, MAX_EVAL_OVERLAP / 2, 0.0)
        )
        return SecondsRange(least.low, middle.likely, most.high)

    def _with_evaluations_s(self, in_idle_time: float, factors: Factors) -> float:
        """Return the seconds of all steps and their evaluations, which idle stages make in part."""
        evaluated = _evaluation(self._spec, self._stages, factors)
        shadows = _shadows(self._spec, self._stages, factors)
        more_s = shadows.seconds if shadows is not None else 0.0
        if evaluated is not None:
            more_s += evaluated.seconds * (evaluated.times - 1) / evaluated.times
        return self.seconds(factors) + (1 - in_idle_time) * more_s

    def _all_s(self, factors: Factors, first: Pipeline, later: Pipeline) -> float:
        seconds = self._num_first * step_cost(first, factors).seconds
        if self._num_later:
            seconds += self._num_later * step_cost(later, factors).seconds
        return seconds


def _pipeline(spec: RunSpec, stages: Sequence[_Stage], *, is_first: bool) -> Pipeline:
    peers = [peer for stage in stages for peer in stage.peers]
    names = [name for stage in stages for name in stage.machines]
    return Pipeline(
        stages=tuple(
            StageWork(
                time=_time(spec, stages, index, is_first=is_first),
                blocks=len(stage.layers),
                trained_bytes=stage.trained_bytes,
                frames=spec.num_frames(stage.layers.start) if index else 0,
                machines=stage.machines,
                busy=stage.busy,
            )
            for index, stage in enumerate(stages)
        ),
        num_microbatches=spec.train.batch_size // spec.train.micro_batch_size,
        control_s=2 * max(stage.round_trip_s for stage in stages),
        cores={name: peer.machine.cores for name, peer in zip(names, peers, strict=True)},
        busy={name: peer.host_busy for name, peer in zip(names, peers, strict=True)},
        load={name: peer.host_load for name, peer in zip(names, peers, strict=True)},
    )


def _bound_words(stages: Sequence[_Stage], step: StepCost, name_of: Callable[[str], str]) -> str:
    """Return the slowest part of a step, for people."""
    if step.bound is Limit.CORES:
        names = [
            name_of(peer.peer_id)
            for stage in stages
            for peer in stage.peers
            if step.machine in stage.machines
        ]
        return f"the cores of the machine of {' and '.join(dict.fromkeys(names))}"
    stage = stages[step.stage]
    names = [name_of(peer.peer_id) for peer in stage.peers]
    if step.bound is Bound.COMPUTE:
        return f"the compute of {' and '.join(names)} (layers {stage.layers})"
    return f"the {step.bound.value} of {' and '.join(names)}"


def _time(spec: RunSpec, stages: Sequence[_Stage], index: int, *, is_first: bool) -> StageTime:
    """Return the part of a step's time that one stage and the boundary in front of it take."""
    stage, comes, hop_s = stages[index], Crossing(), (0.0, 0.0)
    if index:
        ahead, comes = stages[index - 1], stage.comes(is_first=is_first)
        back_s = stage.hop_s(comes.backward, ahead) if comes.backward else 0.0
        hop_s = ahead.hop_s(comes.forward, stage), back_s
    return StageTime(
        compute_s=stage.compute_s,
        turn_s=stage.turn_s,
        comes=comes,
        hop_s=hop_s,
        up_bytes_per_s=stage.up_bytes_per_s,
        down_bytes_per_s=stage.down_bytes_per_s,
        reduced_s=_reduced_bytes(spec, stages, stage) / stage.slowest_up,
    )


def _crossings(stages: Sequence[_Stage], *, is_first: bool) -> list[Crossing]:
    """Return the bytes over the boundary in front of each stage; the first stage has none."""
    return [Crossing(), *(stage.comes(is_first=is_first) for stage in stages[1:])]


def _evaluation(spec: RunSpec, stages: Sequence[_Stage], factors: Factors) -> EvalForecast | None:
    train, times = spec.train, num_evaluations(spec.train)
    if not times:
        return None
    first, later = stages, stages[_entry(spec, stages) :]
    each = [
        _evaluated(
            spec, entered, count * train.num_eval_samples, factors, is_compressed=is_compressed
        )
        for entered, count in ((first, 1), (later, times - 1))
        for is_compressed in train.eval_passes
    ]
    return EvalForecast(
        times=times,
        samples=train.num_eval_samples * len(train.eval_passes),
        sent_bytes=sum(sent_bytes for sent_bytes, _ in each),
        seconds=sum(seconds for _, seconds in each),
    )


def _shadows(spec: RunSpec, stages: Sequence[_Stage], factors: Factors) -> EvalForecast | None:
    """Forecast the shadow microbatches; they start at the first stage because caches skip none."""
    train, samples = spec.train, spec.train.micro_batch_size
    if not train.quality or all(spec.is_cacheable(stage.layers.start) for stage in stages[1:]):
        return None
    times = num_measured(train.num_steps)
    sent_bytes, seconds = _evaluated(spec, stages, times * samples, factors, is_compressed=False)
    return EvalForecast(times=times, samples=samples, sent_bytes=sent_bytes, seconds=seconds)


def _evaluated(
    spec: RunSpec,
    stages: Sequence[_Stage],
    samples: int,
    factors: Factors,
    *,
    is_compressed: bool,
) -> tuple[float, float]:
    """Return the bytes and seconds of a forward pass over these samples.

    Samples follow each other at the pace of the slowest stage or link.
    """
    sizes = _evaluated_bytes(spec, stages, is_compressed=is_compressed)
    microbatches = samples / spec.train.micro_batch_size
    computed_s = forward_turn_s(
        _pipeline(spec, stages, is_first=False), [stage.forward_s for stage in stages], factors
    )
    turn_s = max(computed_s, factors.link * max(_link_turns(stages, sizes)))
    return microbatches * sum(sizes), microbatches * turn_s


def _evaluated_bytes(
    spec: RunSpec, stages: Sequence[_Stage], *, is_compressed: bool
) -> list[float]:
    """Return the bytes of one evaluated microbatch over each boundary between these stages."""
    train = spec.train
    usual = train.compressed_eval_codec if is_compressed else UNCOMPRESSED
    codecs = (
        train.constant_codec if spec.is_cacheable(stage.layers.start) else usual
        for stage in stages[1:]
    )
    return [_frames_bytes(spec, codec) for codec in codecs]


def _link_turns(stages: Sequence[_Stage], sizes: Sequence[float]) -> Iterable[float]:
    """Yield the seconds that each link needs for one more evaluated microbatch."""
    for stage, comes, goes in zip(stages, (0.0, *sizes), (*sizes, 0.0), strict=True):
        yield goes / stage.up_bytes_per_s
        yield comes / stage.down_bytes_per_s


def _peer_memory(
    spec: RunSpec, stages: Sequence[_Stage], index: int, found: StageMemory | None
) -> PeerMemory | None:
    """Return a replica's memory with as many microbatches as plain 1F1B keeps in flight."""
    if found is None:
        return None
    stage, train = stages[index], spec.train
    microbatches = 1
    if spec.gradients_cross(stage.layers.stop):
        own = math.ceil(train.batch_size / train.micro_batch_size / len(stage.peers))
        microbatches = min(own, min_microbatches(len(stages), index))
    return PeerMemory(
        static=found.held,
        microbatch=found.microbatch,
        microbatches=microbatches,
        temporaries=found.temporaries(microbatches),
        total=found.most(microbatches),
    )


def _stage_forecast(
    spec: RunSpec,
    stages: Sequence[_Stage],
    index: int,
    memory: Mapping[LayerRange, StageMemory | None],
    factors: Factors,
    name_of: Callable[[str], str],
) -> StageForecast:
    stage, train = stages[index], spec.train
    num_first = min(train.num_steps, train.steps_per_epoch)
    sent = received = 0.0
    visits = ((0, num_first, True), (_entry(spec, stages), train.num_steps - num_first, False))
    for begins_at, steps, is_first in visits:
        if index >= begins_at:
            crossings = _crossings(stages[begins_at:], is_first=is_first)
            own = exchanged(crossings, index - begins_at)
            microbatches = steps * train.batch_size / train.micro_batch_size / len(stage.peers)
            sent, received = sent + microbatches * own[0], received + microbatches * own[1]
    reduced = train.num_steps * _reduced_bytes(spec, stages, stage)
    return StageForecast(
        layers=stage.layers,
        peers=tuple(peer.peer_id for peer in stage.peers),
        memory=_peer_memory(spec, stages, index, memory.get(stage.layers)),
        compute_s=factors.load
        * (factors.compute * stage.compute_s + factors.block_s * len(stage.layers)),
        up_bytes=sent + reduced,
        down_bytes=received + reduced,
        names=tuple(name_of(peer.peer_id) for peer in stage.peers),
    )
