"""How long a job will take, what it sends and costs, before anything begins. Pure.

A step is bound from below as any pipeline is: one microbatch goes all the way there and back, and
each other one follows at the pace of the slowest stage or link. What machines and links can do
their peers have measured; a measured value that is missing bounds nothing, and is told. What a step
costs beside that the swarm learned from its runs, see `machines.step_cost`, so seconds are a range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from statistics import mean

import torch
from rich.filesize import decimal

from swarm_ft.codec import from_spec
from swarm_ft.ids import PeerId
from swarm_ft.protocol.machines.pipeline import least_held
from swarm_ft.protocol.machines.step_cost import (
    Factors,
    Limit,
    Pipeline,
    SecondsRange,
    StageWork,
    StepCost,
    bare,
    expected,
    factors_of,
    forward_turn_s,
    step_cost,
)
from swarm_ft.protocol.machines.step_time import Bound, Crossing, StageTime, exchanged
from swarm_ft.protocol.messages.capacity import Costs, Placed, PlacedPeer
from swarm_ft.protocol.messages.enrolment import name_lookup
from swarm_ft.protocol.spec.codec_spec import CodecSpec, Direction, parse_codec_spec
from swarm_ft.protocol.spec.flops import FORWARD_PART, all_flops, num_outputs, stage_flops
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.quality import num_measured
from swarm_ft.protocol.spec.run_spec import BYTES_PER_FLOAT, RunSpec
from swarm_ft.protocol.spec.sample_rows import counts_of, rows_in
from swarm_ft.protocol.spec.training_plan import num_evaluations
from swarm_ft.stage.rehearsal import StageMemory

UNCOMPRESSED = parse_codec_spec("none", Direction.FORWARD)
PROBED_TOKENS, PROBED_CHANNELS = 64, 1024
"""Of the noise by which a codec's size is told."""
PROBED_SAMPLES = 1000
"""By which the mean length of all is told."""
FRAME_BYTES = 64
"""Around a payload: numbers and lengths, HTTP/2, TLS."""
IN_IDLE_TIME = 0.5
"""Of what evaluations take, at most, as far as was seen on machines that are shared."""
BESIDE_SPREAD = 0.25
"""Of how much other runs on the same peers stretch a step, what is not known of it."""
LOAD_SPREAD = 0.25
"""So too of how much other programs on their machines do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """What a replica of a stage needs, if it lends no more than that, in bytes of tensors.

    Attributes:
        held: however many microbatches are: weights, gradients, what the optimizer keeps.
        microbatch: what each of them takes.
        microbatches: that are held at once.
        temporaries: of one task, beside all that.
        total: of all.
    """

    held: int
    microbatch: int
    microbatches: int
    temporaries: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageForecast:
    """One stage.

    Attributes:
        layers: its blocks.
        peers: Ids of its replicas.
        memory: at each of them; None if nobody said what the stage takes.
        compute_s: of a microbatch, there and back, at the mean replica.
        up_bytes: that each replica sends, in the whole run.
        down_bytes: that each receives.
        names: Names of its replicas for people.
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
    """What evaluations take, or shadows, which is in nothing else of a forecast.

    Attributes:
        times: how often samples are evaluated, if the run does not stop early.
        samples: that are evaluated each time, those of a second pass too.
        sent_bytes: over all boundaries, in the whole run.
        seconds: of them all, did nothing of it fit into the time in which stages idle.
    """

    times: int
    samples: int
    sent_bytes: float
    seconds: float

    def line(self, what: str) -> str:
        """In one line, for people."""
        return (
            f"{what:<9} {self.times} times {self.samples} samples, in all: sends "
            f"{decimal(round(self.sent_bytes))}, takes up to {self.seconds:.3g} s"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a job will take.

    Attributes:
        stages: first to last.
        first_step_s: while samples are met for the first time.
        step_s: after that; without frozen stages in front, if what these made is kept.
        seconds: of all steps.
        seconds_range: that holds nine of ten, evaluations included.
        samples_per_s: in the mean.
        samples_range: from the slowest to the fastest of that range.
        num_learned: runs from which the swarm knows what a step costs.
        bound_by: what no step can be faster for.
        kwh: of the machines whose watts are known.
        evaluation: of held-out samples, apart from all else; None if there is none.
        shadows: so too, by which it is measured what compression costs; None where no quality was
            asked for.
        unknown: what nobody measured, in words; the forecast leaves it out.
        shared: peers that share a machine or train other runs, in words.
        num_waiting: runs that wait for peers, and come before this one.
        starts_after_s: until these peers have room for it; 0: it begins at once.
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
        first, later = f"{self.first_step_s:.3g}", f"{self.step_s:.3g}"
        steps = (
            f"{first} s a step" if first == later else f"{first} s a step at first, then {later}"
        )
        return (
            f"forecast  {low:.3g} to {high:.3g} samples/s, "
            f"{duration_words(self.seconds_range.low, self.seconds_range.high)} "
            f"(about {steps}); bound by {self.bound_by}"
        )

    def lines(self) -> Iterator[str]:
        """Yield that line, and what is apart from it."""
        yield self.line()
        for words in self.shared:
            yield f"shared    {words}"
        if self.num_waiting:
            runs = "1 run waits" if self.num_waiting == 1 else f"{self.num_waiting} runs wait"
            yield f"queue     {runs} before this one"
        if self.starts_after_s:
            yield f"start     in about {duration_words(self.starts_after_s)}: other runs end first"
        if not self.num_learned:
            yield "range     wide: no run of this swarm was measured yet"
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
    """Forecast a job by what a coordinator says of its peers, its runs and what it learned.

    Args:
        spec: the job.
        placed: by the coordinator.
        memory: see `forecast`.
    """
    name_of = name_lookup(placed.names)
    ids = {name_of(peer.peer_id): peer.peer_id for peer in placed.peers}
    named = [replace(one, peer_id=PeerId(name_of(one.peer_id))) for one in placed.peers]
    found = forecast(spec, named, memory, placed.costs, placed.beside_s)
    stages = (
        replace(stage, peers=tuple(ids[name] for name in stage.peers), names=stage.peers)
        for stage in found.stages
    )
    return replace(
        found,
        stages=tuple(stages),
        num_waiting=placed.num_waiting,
        starts_after_s=placed.starts_after_s,
    )


def forecast(
    spec: RunSpec,
    placed: Sequence[PlacedPeer],
    memory: Mapping[LayerRange, StageMemory | None] | None = None,
    costs: Costs | None = None,
    beside_s: float = math.inf,
) -> Forecast:
    """What a job will take on these peers.

    Args:
        spec: the job.
        placed: who hosts what, first stage to last, replicas beside each other.
        memory: what stages take, see `stage.rehearsal`, as far as that is asked for.
        costs: of a step beside operations and bytes; None: nothing, so steps are bounds from below.
        beside_s: how long other runs on these peers go on.
    """
    costs = costs or bare()
    stages = [_Stage(spec, tuple(group)) for _, group in groupby(placed, lambda one: one.layers)]
    train, factors = spec.train, factors_of(costs)
    work = _Work(spec, stages, beside_s)
    later = stages[_entry(spec, stages) :]
    step = step_cost(work.later, factors)
    seconds, seconds_range = work.seconds(factors), work.range(costs)
    num_samples = min(train.num_steps * train.batch_size, _visits(spec))
    watts = sum(peer.machine.watts for peer in placed)
    return Forecast(
        stages=tuple(
            _told(spec, stages, index, memory or {}, factors) for index in range(len(stages))
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
        bound_by=_bound_words(later, step),
        kwh=watts * seconds / 3.6e6,
        evaluation=_evaluation(spec, stages, factors),
        shadows=_shadows(spec, stages, factors),
        unknown=tuple(_unknown(placed)),
        shared=tuple(_shared(placed)),
        num_learned=costs.num_runs,
    )


def _shared(placed: Sequence[PlacedPeer]) -> Iterator[str]:
    """Name the peers that share cores, and those that train other runs."""
    on_host: dict[str, list[PlacedPeer]] = {}
    for peer in placed:
        if peer.machine.host:
            on_host.setdefault(peer.machine.host, []).append(peer)
    for peers in on_host.values():
        if len(peers) > 1:
            names = " and ".join(peer.peer_id for peer in peers)
            room = min(peer.machine.cores for peer in peers)
            cores = f"; it computes for {room:.2g} of them at once" if room else ""
            yield f"{names} are on one machine{cores}"
    for peer in placed:
        if peer.num_runs:
            runs = "1 other run" if peer.num_runs == 1 else f"{peer.num_runs} other runs"
            yield f"{peer.peer_id} trains {runs}, {100 * min(1.0, peer.busy):.0f} % of its time"


def of_mean_length(spec: RunSpec, samples: Sequence[bytes]) -> RunSpec:
    """A job with samples that are all as long as its own are in the mean, by some of them.

    Args:
        spec: the job.
        samples: its rows.
    """
    some = samples[:: -(-len(samples) // PROBED_SAMPLES)]
    lengths = counts_of(rows_in(some, spec.train.seq_length)).lengths
    return replace(spec, train=replace(spec.train, seq_length=round(mean(lengths))))


def _visits(spec: RunSpec) -> float:
    train = spec.train
    return train.num_samples * train.num_steps / train.steps_per_epoch


def _unknown(placed: Sequence[PlacedPeer]) -> Iterable[str]:
    for what, values in (
        ("how fast it computes", [peer.machine.flops_per_s for peer in placed]),
        ("how fast its link is", [peer.machine.up_bytes_per_s for peer in placed]),
        ("what it takes in watts", [peer.machine.watts for peer in placed]),
    ):
        silent = values.count(0.0)
        if silent:
            yield f"{silent} of {len(placed)} peers did not say {what}"


# ---- a stage


class _Stage:
    """A stage's replicas, of which each takes its share of the microbatches."""

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
        """By name; a peer of which none is known has one of its own."""
        return tuple(peer.machine.host or peer.peer_id for peer in self.peers)

    @property
    def busy(self) -> float:
        """Share of the mean replica's time that other runs take."""
        return mean(peer.busy for peer in self.peers)

    @property
    def compute_s(self) -> float:
        """Of one microbatch, there and back, at the mean replica."""
        return self._seconds(self._flops)

    def comes(self, *, is_first: bool) -> Crossing:
        """Over the boundary in front of it, of a microbatch."""
        return self._comes[is_first]

    @property
    def forward_s(self) -> float:
        """Of one that is only evaluated."""
        return self._seconds(self._forward_flops)

    def _seconds(self, flops: float) -> float:
        speeds = [m.flops_per_s for m in self._machines if m.flops_per_s]
        return flops / (sum(speeds) / len(speeds)) if speeds else 0.0

    @property
    def turn_s(self) -> float:
        """From one microbatch to the next, all replicas together."""
        return self.compute_s / len(self.peers)

    @property
    def up_bytes_per_s(self) -> float:
        """That all replicas send together."""
        return sum(m.up_bytes_per_s or math.inf for m in self._machines)

    @property
    def down_bytes_per_s(self) -> float:
        """And receive."""
        return sum(m.down_bytes_per_s or math.inf for m in self._machines)

    @property
    def round_trip_s(self) -> float:
        """To the coordinator, of the farthest replica."""
        return max(m.round_trip_s for m in self._machines)

    @property
    def slowest_up(self) -> float:
        """Bytes a second, of the replica with the slowest uplink."""
        return min(m.up_bytes_per_s or math.inf for m in self._machines)

    def hop_s(self, num_bytes: float, to: _Stage) -> float:
        """One replica's microbatch to one of another stage: the narrower of both ends, and the way.

        Ways are known to the coordinator alone, so one between two peers is taken to be as long as
        half of both together.
        """
        rate = min(self.slowest_up, *(m.down_bytes_per_s or math.inf for m in to._machines))
        return num_bytes / rate + (self.round_trip_s + to.round_trip_s) / 4


def _ends_bytes(spec: RunSpec, layers: LayerRange) -> float:
    """Of embeddings and head, as far as the stage has them and they train."""
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
    """What a codec makes of noise: as many bytes a value as it needs for what it cannot foresee.

    Noise has no directions: of codecs that learn some it is what they take of activations.
    """
    if spec.is_directional:
        return spec.usual_bits / 8
    noise = torch.randn(PROBED_TOKENS, PROBED_CHANNELS, generator=torch.Generator().manual_seed(0))
    base = torch.zeros_like(noise) if spec.is_delta else None
    return len(from_spec(spec).encode(noise, base).payload) / noise.numel()


def _entry(spec: RunSpec, stages: Sequence[_Stage]) -> int:
    """The stage at which samples begin that come again; 0 if at the first."""
    return spec.entry_of(stage.layers for stage in stages)


def _boundary_bytes(spec: RunSpec, boundary: int, *, is_first: bool) -> Crossing:
    """Of a microbatch, as its samples come for the first time, or again."""
    train = spec.train
    forward = train.codec(Direction.FORWARD)
    if is_first and forward.is_delta:
        forward = train.key_frame_codec(Direction.FORWARD)
    if spec.is_constant(boundary):
        forward = train.constant_codec
    backward = train.codec(Direction.BACKWARD) if spec.gradients_cross(boundary) else None
    return Crossing(
        _frames_bytes(spec, forward), _frames_bytes(spec, backward) if backward else 0.0
    )


def _frames_bytes(spec: RunSpec, codec: CodecSpec) -> float:
    """Of a microbatch's frames."""
    train = spec.train
    values = train.seq_length * spec.model.hidden_size
    return train.micro_batch_size * (values * bytes_per_value(codec) + FRAME_BYTES)


def _reduced_bytes(spec: RunSpec, stages: Sequence[_Stage], stage: _Stage) -> float:
    """That each replica sends to sum a step's gradients.

    Over the stage's replicas all of them, and those of weights that several stages train over one
    replica of each of these.
    """
    rate = bytes_per_value(spec.train.reduction_codec)
    of_replicas = rate * stage.trained_bytes / BYTES_PER_FLOAT
    sharing = spec.sharing(stages)
    of_stages = spec.shared_values * BYTES_PER_FLOAT if stage in sharing else 0.0
    return _times(len(stage.peers)) * of_replicas + _times(len(sharing)) * of_stages


def _times(members: int) -> float:
    """How often each member of a sum sends its gradient: in shares, and as the sum of its own."""
    return 2 * (members - 1) / members if members else 0.0


# ---- a step


class _Work:
    """The steps of a job on some stages."""

    def __init__(self, spec: RunSpec, stages: Sequence[_Stage], beside_s: float) -> None:
        train = spec.train
        self._beside_s = beside_s
        self._num_first = min(train.num_steps, train.steps_per_epoch)
        self._num_later = train.num_steps - self._num_first
        self._spec, self._stages = spec, stages
        self.first = _pipeline(spec, stages, is_first=True)
        self.later = _pipeline(spec, stages[_entry(spec, stages) :], is_first=False)

    def seconds(self, factors: Factors) -> float:
        """Return the seconds of all steps; other runs slow them as long as these go on."""
        beside_s = self._all_s(factors, self.first, self.later)
        if beside_s <= self._beside_s or not beside_s:
            return beside_s
        done = self._beside_s / beside_s
        return self._beside_s + (1 - done) * self._all_s(
            factors, self.first.alone, self.later.alone
        )

    def range(self, costs: Costs) -> SecondsRange:
        """Return the range of seconds; its upper end has all evaluations and shadows."""
        factors = factors_of(costs)
        with_others_s = self._all_s(factors, self.first, self.later)
        alone_s = self._all_s(factors, self.first.alone, self.later.alone)
        quiet_s = self._all_s(factors, self.first.quiet, self.later.quiet)
        spread = 0.0
        if quiet_s:
            by_runs = BESIDE_SPREAD * math.log(with_others_s / alone_s)
            spread = math.hypot(by_runs, LOAD_SPREAD * math.log(alone_s / quiet_s))
        least, middle, most = (
            expected(costs, partial(self._with_evaluations_s, part), spread)
            for part in (IN_IDLE_TIME, IN_IDLE_TIME / 2, 0.0)
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
        told_s=2 * max(stage.round_trip_s for stage in stages),
        cores={name: peer.machine.cores for name, peer in zip(names, peers, strict=True)},
        busy={name: peer.host_busy for name, peer in zip(names, peers, strict=True)},
        load={name: peer.host_load for name, peer in zip(names, peers, strict=True)},
    )


def _bound_words(stages: Sequence[_Stage], step: StepCost) -> str:
    """Say what a step is bound by."""
    if step.bound is Limit.CORES:
        names = [
            p.peer_id for stage in stages for p in stage.peers if step.machine in stage.machines
        ]
        return f"the cores of the machine of {' and '.join(dict.fromkeys(names))}"
    stage = stages[step.stage]
    names = [peer.peer_id for peer in stage.peers]
    if step.bound is Bound.COMPUTE:
        return f"what {' and '.join(names)} computes (layers {stage.layers})"
    return f"the {step.bound.value} of {' and '.join(names)}"


def _time(spec: RunSpec, stages: Sequence[_Stage], index: int, *, is_first: bool) -> StageTime:
    """What a stage, and the boundary in front of it, adds to a step."""
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
    """Over the boundary in front of each; nothing comes to the first."""
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
    """Of steps' first microbatches; they enter at the first stage, since none keeps any of them."""
    train, samples = spec.train, spec.train.micro_batch_size
    if not train.quality or all(spec.is_constant(stage.layers.start) for stage in stages[1:]):
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
    """Bytes and seconds: samples follow each other at the pace of the slowest stage or link."""
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
    """Of a microbatch that is only evaluated, over each boundary between these stages."""
    train = spec.train
    usual = train.compressed_eval_codec if is_compressed else UNCOMPRESSED
    codecs = (
        train.constant_codec if spec.is_constant(stage.layers.start) else usual
        for stage in stages[1:]
    )
    return [_frames_bytes(spec, codec) for codec in codecs]


def _link_turns(stages: Sequence[_Stage], sizes: Sequence[float]) -> Iterable[float]:
    """What each link needs for one more microbatch that is evaluated."""
    for stage, comes, goes in zip(stages, (0.0, *sizes), (*sizes, 0.0), strict=True):
        yield goes / stage.up_bytes_per_s
        yield comes / stage.down_bytes_per_s


def _peer_memory(
    spec: RunSpec, stages: Sequence[_Stage], index: int, found: StageMemory | None
) -> PeerMemory | None:
    """Of the microbatches that plain 1F1B holds, as far as a step has so many for a replica."""
    if found is None:
        return None
    stage, train = stages[index], spec.train
    microbatches = 1
    if spec.gradients_cross(stage.layers.stop):
        own = math.ceil(train.batch_size / train.micro_batch_size / len(stage.peers))
        microbatches = min(own, least_held(len(stages), index))
    return PeerMemory(
        held=found.held,
        microbatch=found.microbatch,
        microbatches=microbatches,
        temporaries=found.temporaries(microbatches),
        total=found.most(microbatches),
    )


def _told(
    spec: RunSpec,
    stages: Sequence[_Stage],
    index: int,
    memory: Mapping[LayerRange, StageMemory | None],
    factors: Factors,
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
    )
