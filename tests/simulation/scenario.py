"""The scenario of a seed: a run, the machines that take part in it, and their faults. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from random import Random

from swarm_ft.protocol.spec.bounds import MAX_HOSTED
from swarm_ft.protocol.spec.run_spec import (
    Codecs,
    EvalCompression,
    LrSchedule,
    ModelSpec,
    RunSpec,
    TrainSpec,
)
from tests.simulation.engine import MODULUS

COORDINATOR, CLIENT = "coordinator", "client"
MAX_FAULTS = 8
MAX_TURNS = 8
TAKE_OVERS = 0.25
"""Of all scenarios."""
EVALUATIONS = 0.5
"""So too those in which held-out samples are evaluated."""
SIDE_BY_SIDE = 0.2
"""So too those in which more than one run shares the peers."""
PEERS_KEEP = 0.3
"""So too those in which peers keep each other's snapshots."""
STEERED = 0.3
"""So too those whose owners change codecs on the way."""
MAX_OTHERS = 2
SHARED_PART = 0.6
"""Of these, those whose peers host stages of several runs."""
JUDGED = 0.6
"""Of these, those that evaluations may end, or whose best weights are the result."""
OTHER_CODECS = {
    "none": "fp16",
    "aq8t": "aq7t",
    "q8": "q7",
    "q8+ef": "q7+ef",
    "q8+ef21": "q7+ef21",
}
"""Of all that are drawn; what these err is rounded away too, see `engine`."""
FIRST_FAULT_S, LAST_FAULT_S = 0.05, 10.0
"""Faults begin within this time; most runs that meet none are over after a few seconds."""


class FaultKind(StrEnum):
    """The kinds of faults."""

    CRASH = "crash"
    """Killed; its system closes its connections. Starts again later, under its own name."""
    POWER_CUT = "power-cut"
    """As CRASH, but nobody is told."""
    REPLACED = "replaced"
    """As CRASH, but what starts again is another peer, under another name."""
    LEAVE = "leave"
    """Says goodbye; another peer joins later."""
    PAUSE = "pause"
    SLOW = "slow"
    """Its computations take longer."""
    PARTITION = "partition"
    """Nothing passes between two machines."""
    ONE_WAY = "one-way"
    """Nothing passes from one machine to another, but everything the other way."""
    ISOLATED = "isolated"
    """Nothing passes between a machine and all others, nor the directory."""
    CUT = "cut"
    """Connections between two machines break."""
    STALL = "stall"
    """Connections between two machines fall silent; new ones work."""
    THIN_LINK = "thin-link"
    """Bandwidth falls and latency rises."""
    FULL_DISK = "full-disk"
    CLOCK_JUMP = "clock-jump"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    GARBLE = "garble"
    """Messages that do not parse."""
    JOIN = "join"
    """One more peer."""


class Moment(StrEnum):
    """A recurring moment of a run, at which a fault may hit it."""

    PLANNED = "planned"
    """The journal has a step's plan."""
    BEGAN = "began"
    """A stage begins a step."""
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMITTED = "committed"
    """The journal has a step's commit; nobody was told yet."""
    APPLIED = "applied"
    EXPORTED = "exported"
    FINISHED = "finished"
    """The journal says that the result can be fetched."""
    LOADED = "loaded"
    TAKEN_OVER = "taken-over"
    """A stage has the state of its other replicas, or of a snapshot."""
    COPIED = "copied"
    """A stage's state was copied, for a newcomer or for a snapshot."""
    EVALUATED = "evaluated"
    """A stage computed with held-out samples; only drawn where there are some."""


PEERS_ONLY = frozenset({FaultKind.REPLACED, FaultKind.LEAVE})
PAIRS = frozenset(
    {FaultKind.PARTITION, FaultKind.ONE_WAY, FaultKind.CUT, FaultKind.STALL, FaultKind.THIN_LINK}
)
TAMPERING = frozenset({FaultKind.DUPLICATE, FaultKind.REORDER, FaultKind.CORRUPT, FaultKind.GARBLE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One trouble.

    Attributes:
        at_s: when it begins; with a moment, the earliest.
        duration_s: after which it is over; for crashes: after which the machine is back.
        machine: whose trouble it is.
        other: the other machine, for those between two.
        amount: how bad; its meaning depends on the kind.
        moment: what it waits for; None: it begins at `at_s`.
        turns: of the loop, by which it misses its moment.
    """

    kind: FaultKind
    at_s: float
    duration_s: float
    machine: str
    other: str = ""
    amount: float = 0.0
    moment: Moment | None = None
    turns: int = 0

    def __str__(self) -> str:
        pair = f" {self.other}" if self.other else ""
        when = f"at {self.at_s:.2f} s"
        if self.moment is not None:
            when = f"{self.turns} turns after the first {self.moment} from {self.at_s:.2f} s on"
        what = f"{self.kind} {self.machine}{pair}"
        return f"{what} {when} for {self.duration_s:.2f} s, {self.amount:.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """All that is decided before a simulation begins.

    Attributes:
        layers: what each peer offers, as `--layers` takes it; peers are `peer-0`, `peer-1`, ...
        window_messages: messages of a call that may be unread.
        mean_compute_s: of a computation.
        handover_s: that each message of a state takes longer on its way to a newcomer.
        others: other runs, and how late their clients come.
        peers_keep: whether snapshots lie with the peers, and in no place that all reach.
        max_beside: stages of other runs that each peer hosts beside its first.
        codecs: what owners want their runs to go by, of each run in turn, and after how many steps.
        computes_by_block: whether a computation takes `mean_compute_s` for each block of a stage.
    """

    seed: int
    spec: RunSpec
    layers: tuple[str, ...]
    faults: tuple[Fault, ...]
    window_messages: int
    mean_compute_s: float
    handover_s: float = 0.0
    others: tuple[tuple[float, RunSpec], ...] = ()
    peers_keep: bool = False
    max_beside: int = 0
    codecs: tuple[tuple[int, Codecs], ...] = ()
    computes_by_block: bool = False

    @property
    def specs(self) -> tuple[RunSpec, ...]:
        """Return the specs of all runs."""
        return self.spec, *(spec for _, spec in self.others)


def draw(seed: int) -> Scenario:
    """The scenario that a seed stands for."""
    rng = Random(f"{seed}/scenario")
    num_blocks = rng.choice((2, 3, 4))
    layers = _draw_layers(rng, num_blocks)
    machines = [COORDINATOR, CLIENT, *(f"peer-{i}" for i in range(len(layers)))]
    faults = [_draw_fault(rng, machines, layers) for _ in range(rng.randrange(MAX_FAULTS + 1))]
    scenario = Scenario(
        seed=seed,
        spec=_with_frozen_blocks(_draw_spec(rng, num_blocks)),
        layers=layers,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        window_messages=rng.choice((2, 8, 64)),
        mean_compute_s=10 ** rng.uniform(-3, -1),
    )
    own = Random(f"{seed}/take-over")
    scenario = _with_take_over(scenario, own) if own.random() < TAKE_OVERS else scenario
    own = Random(f"{seed}/evaluation")
    scenario = _with_evaluation(scenario, own) if own.random() < EVALUATIONS else scenario
    own = Random(f"{seed}/best")
    is_judged = scenario.spec.train.num_eval_samples and own.random() < JUDGED
    scenario = _with_best(scenario, own) if is_judged else scenario
    own = Random(f"{seed}/side-by-side")
    scenario = _with_others(scenario, own) if own.random() < SIDE_BY_SIDE else scenario
    own = Random(f"{seed}/beside")
    if scenario.others and own.random() < SHARED_PART:
        scenario = replace(scenario, max_beside=own.choice((1, 2, MAX_HOSTED - 1)))
    own = Random(f"{seed}/keepers")
    scenario = replace(scenario, peers_keep=own.random() < PEERS_KEEP)
    own = Random(f"{seed}/codecs")
    return with_other_codecs(scenario, own) if own.random() < STEERED else scenario


def with_other_codecs(scenario: Scenario, rng: Random) -> Scenario:
    """Every run goes by codecs of a bit less, or that lose nothing here, from some step on."""
    found = []
    for spec in scenario.specs:
        train = spec.train
        forward, backward = OTHER_CODECS[train.forward_codec], OTHER_CODECS[train.backward_codec]
        found.append((rng.randrange(train.num_steps), Codecs(forward, backward)))
    return replace(scenario, codecs=tuple(found))


def _with_others(scenario: Scenario, rng: Random) -> Scenario:
    """Other runs of models as large or not, and some more peers: too few of them or too many."""
    num_blocks = scenario.spec.model.num_blocks
    others, layers = [], list(scenario.layers)
    for number in range(rng.randint(1, MAX_OTHERS)):
        blocks = rng.choice((num_blocks, num_blocks, 2, 3))
        spec = _with_frozen_blocks(_draw_spec(rng, blocks))
        # No two are equal: who sees an engine knows its run by its spec.
        spec = replace(spec, train=replace(spec.train, seed=2 * spec.train.seed + number))
        others.append((rng.uniform(0.0, 4.0), spec))
        layers += _draw_layers(rng, blocks)
    peers = [f"peer-{number}" for number in range(len(layers))]
    faults = tuple(
        replace(fault, machine=rng.choice(peers)) if fault.machine in peers[:-1] else fault
        for fault in scenario.faults
    )
    faults = tuple(fault for fault in faults if fault.machine != fault.other)
    return replace(scenario, others=tuple(others), layers=tuple(layers), faults=faults)


def _with_best(scenario: Scenario, rng: Random) -> Scenario:
    """Evaluations may end the run, and choose the weights of its result."""
    eval_steps = rng.choice((1, 2))
    train = replace(
        scenario.spec.train,
        eval_steps=eval_steps,
        save_steps=eval_steps * rng.choice((1, 1, 2)),
        save_total_limit=rng.choice((1, 2, 3)),
        early_stopping_patience=rng.choice((0, 1, 2)),
        load_best_model_at_end=rng.random() < 0.7,
    )
    return replace(scenario, spec=replace(scenario.spec, train=train))


def _with_evaluation(scenario: Scenario, rng: Random) -> Scenario:
    """Held-out samples are evaluated; a fault may hit just that."""
    train = replace(
        scenario.spec.train,
        num_eval_samples=rng.randint(1, 6),
        eval_steps=rng.choice((0, 1, 2)),
        eval_compression=rng.choice(tuple(EvalCompression)),
    )
    faults = list(scenario.faults)
    if faults and rng.random() < 0.5:
        place = rng.randrange(len(faults))
        faults[place] = replace(faults[place], moment=Moment.EVALUATED)
    return replace(scenario, spec=replace(scenario.spec, train=train), faults=tuple(faults))


def _with_take_over(scenario: Scenario, rng: Random) -> Scenario:
    """A newcomer early in a longer run; it gets the state slowly, and listens meanwhile."""
    train = scenario.spec.train
    train = replace(train, num_steps=train.num_steps + rng.randint(4, 12))
    joins = Fault(
        kind=FaultKind.JOIN,
        at_s=0.0,
        duration_s=1.0,
        machine="peer-new",
        other=rng.choice(scenario.layers),
        moment=Moment.COMMITTED,
        turns=rng.randrange(MAX_TURNS),
    )
    return replace(
        scenario,
        spec=replace(scenario.spec, train=train),
        faults=(joins, *scenario.faults),
        handover_s=scenario.mean_compute_s * 10 ** rng.uniform(0.5, 2),
    )


def _draw_layers(rng: Random, num_blocks: int) -> tuple[str, ...]:
    num_stages = rng.randint(1, min(3, num_blocks))
    if rng.random() < 0.3:
        return ("auto",) * (num_stages + rng.randrange(2))
    cuts = sorted(rng.sample(range(1, num_blocks), num_stages - 1))
    edges = [0, *cuts, num_blocks]
    stages = [f"{start}-{stop}" for start, stop in pairwise(edges)]
    return (*stages, *rng.choices(stages, k=rng.choice((0, 1, 2, 3))))


def _draw_spec(rng: Random, num_blocks: int) -> RunSpec:
    micro_batch_size = rng.choice((1, 2))
    num_samples = rng.randint(4, 14)
    return RunSpec(
        model=ModelSpec(
            reference="tiny",
            architecture="tiny",
            num_blocks=num_blocks,
            hidden_size=4,
            vocab_size=2 * MODULUS,
            block_bytes=1024,
            embed_digest=bytes(16),
            block_digests=(bytes(16),) * num_blocks,
            head_digest=bytes(16),
            nonce=bytes(16),
            tied_embeddings=False,
        ),
        train=TrainSpec(
            num_samples=num_samples,
            seq_length=2,
            batch_size=micro_batch_size * rng.randint(1, 5),
            micro_batch_size=micro_batch_size,
            num_steps=rng.randint(2, 8),
            learning_rate=0.5,
            lr_schedule=rng.choice(tuple(LrSchedule)),
            warmup_steps=rng.choice((0, 1)),
            clip_grad_norm=rng.choice((0.0, 50.0)),
            seed=rng.randrange(1 << 20),
            shuffle=rng.random() < 0.5,
            forward_codec=rng.choice(("none", "aq8t")),
            save_steps=rng.choice((0, 1, 2)),
            dp_codec=rng.choice(("none", "none", "fp16")),
            backward_codec=rng.choice(("none", "none", "q8", "q8+ef", "q8+ef21")),
            key_codec="fp16",
            buffer_bits=rng.choice((16, 8, 4)),
        ),
    )


def _with_frozen_blocks(spec: RunSpec) -> RunSpec:
    """Freeze blocks in half of the runs; their own random numbers keep known seeds the same."""
    rng, num_blocks = Random(spec.train.seed), spec.model.num_blocks
    if num_blocks == 1 or rng.random() < 0.5:
        return spec
    start = rng.randrange(num_blocks)
    stop = rng.choice((num_blocks, rng.randint(start + 1, num_blocks)))
    codec = rng.choice(("none", "fp16", "q8t"))
    train = replace(spec.train, train_layers=f"{start}-{stop}", frozen_codec=codec)
    return replace(spec, train=train)


def _draw_fault(rng: Random, machines: list[str], layers: tuple[str, ...]) -> Fault:
    kind = rng.choice(tuple(FaultKind))
    peers = [machine for machine in machines if machine.startswith("peer")]
    machine = rng.choice(peers if kind in PEERS_ONLY | TAMPERING else machines)
    other = ""
    if kind in PAIRS:
        other = rng.choice([name for name in machines if name != machine])
    if kind is FaultKind.JOIN:
        machine, other = "peer-new", rng.choice(layers)
    if kind is FaultKind.FULL_DISK:
        machine = rng.choice([name for name in machines if name != CLIENT])
    return Fault(
        kind=kind,
        at_s=FIRST_FAULT_S * (LAST_FAULT_S / FIRST_FAULT_S) ** rng.random(),
        duration_s=10 ** rng.uniform(-1, 1.7),
        machine=machine,
        other=other,
        amount=rng.random(),
        moment=rng.choice(tuple(Moment)[:-1]) if rng.random() < 0.5 else None,
        turns=rng.randrange(MAX_TURNS),
    )
