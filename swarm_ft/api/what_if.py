"""A comparison of a run's simulated future with a change and without it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from swarm_ft.client.forecast import forecast
from swarm_ft.coordinator.facts.events import Event, PeerLost
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.member_names import NO_NAMES, MemberNames
from swarm_ft.coordinator.plan.lateness import state_bytes
from swarm_ft.coordinator.plan.routes import expected_s
from swarm_ft.coordinator.reason_texts import event_in_words
from swarm_ft.coordinator.replay import Moment
from swarm_ft.coordinator.simulation import SimulationResult, share_of, simulate_from
from swarm_ft.errors import BadOption
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.machines.step_time import forecast_after_change_s
from swarm_ft.protocol.messages.capacity import Machine, PlacedPeer
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.spec.flops import stage_flops

BYTES_PER_S = 1e6 / 8
"""Bytes per second of one Mbps."""
LOAD_BYTES_PER_S = 100 * BYTES_PER_S
"""Assumed rate of receiving a stage's state over a link without a measurement."""
EXPECTED = (
    "expected 'peer NAME: 20 Mbps', 'peer NAME: 20 Mbps up', 'peer NAME: 2x compute' or "
    "'peer NAME: gone'"
)
_WORDS = re.compile(
    r"peer\s+(?P<peer>\S+?(?:\s+\(\S+\))?)\s*:\s*(?:(?P<gone>gone)|(?P<mbps>\d+(?:\.\d+)?)\s*Mbps"
    r"(?:\s+(?P<way>up|down))?|(?P<factor>\d+(?:\.\d+)?)\s*x\s+compute)",
    re.IGNORECASE,
)
MAX_LINE_BYTES = 1 << 20
"""Bytes of a text with names, which may name all peers."""
_OF_PLANS = frozenset(EventKind) - {EventKind.SNAPSHOT_WHOLE, EventKind.RUN_EVALUATED}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of one peer; None leaves a value unchanged.

    Attributes:
        text: Text of the request.
        peer_id: The peer.
        is_gone: Whether the peer leaves the swarm.
        up_bytes_per_s: New rate of sending, in bytes per second.
        down_bytes_per_s: New rate of receiving, in bytes per second.
        compute_factor: Factor of the computing speed.
    """

    text: str
    peer_id: PeerId
    is_gone: bool = False
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    compute_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A simulated future of a run.

    Attributes:
        num_steps: Number of simulated steps.
        step_s: Mean seconds of the second half of these steps; None without steps.
        eta_s: Seconds until the run's last step; None if unknown.
        bound_by: Bottleneck of a step; empty if unknown.
        plans: Decisions of the coordinator, each after a number of seconds.
        pipeline: Final stages with their peers and the microbatches of each.
    """

    num_steps: int
    step_s: float | None
    eta_s: float | None
    bound_by: str
    plans: tuple[tuple[float, str], ...]
    pipeline: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The futures of a run with changes and without them.

    Attributes:
        run_id: The run.
        step: Step at which the simulation begins.
        num_steps: Number of steps of the run.
        changes: Texts of the changes.
        baseline: Future without the changes.
        changed: Future with the changes.
        unknown: Missing measurements, which the simulation ignores.
    """

    run_id: RunId
    step: int
    num_steps: int
    changes: tuple[str, ...]
    baseline: Projection
    changed: Projection
    unknown: tuple[str, ...]


def parse_change(words: str, state: SwarmState, names: MemberNames = NO_NAMES) -> Change:
    """Parse a change.

    Args:
        words: Text such as "peer NAME: 20 Mbps". NAME is a name for people, with or without the
            letters in parentheses, or the first letters of an id; it has to mean one member.
        state: State of the swarm with its members.
        names: Names of members for people.

    Raises:
        BadOption: The text is no change, or no member has this name.
    """
    found = _WORDS.fullmatch(words.strip())
    if found is None:
        raise BadOption(f"--what-if {ascii(words)[:80]}: {EXPECTED}")
    factor = float(found["factor"] or 1.0)
    rate = None if found["mbps"] is None else float(found["mbps"]) * BYTES_PER_S
    if factor <= 0.0 or rate == 0.0:
        raise BadOption(f"--what-if {ascii(words)[:80]}: expected more than 0")
    return Change(
        text=words,
        peer_id=_named(words, found["peer"], state, names),
        is_gone=found["gone"] is not None,
        up_bytes_per_s=rate if found["way"] != "down" else None,
        down_bytes_per_s=rate if found["way"] != "up" else None,
        compute_factor=factor,
    )


def _named(words: str, name: str, state: SwarmState, names: MemberNames) -> PeerId:
    name = " ".join(name.split())
    meant = [peer for peer in state.members if peer == name]
    found = names.found(name)
    meant = meant or [
        peer
        for peer in state.members
        if peer in found or peer.startswith(name) or name == names.shown(peer)
    ]
    if len(meant) != 1:
        known = ", ".join(map(names.shown, state.members)) or "none"
        raise BadOption(f"--what-if {ascii(words)[:80]}: expected one of the peers {known}")
    return meant[0]


def compare(moment: Moment, run_id: RunId, changes: Sequence[Change]) -> Comparison:
    """Simulate a run from a moment on, with these changes and without them.

    All texts of the result have the moment's names of members.

    Raises:
        BadOption: The run is over, or has no peers at that moment.
    """
    run = moment.state.runs[run_id]
    if run.phase.is_over or not run.attempt.assignments:
        raise BadOption(
            f"--what-if: expected a run with peers at that moment, got {run_id}, "
            f"{run.phase.name.lower()}"
        )
    machines, state = dict(moment.machines), moment.state
    for change in changes:
        machines[change.peer_id] = _machine(machines.get(change.peer_id, Machine()), change)
        state = _with_change(state, change)
    names = moment.names
    was = _Foreseen(run, moment.machines, moment.machines, {}, names.shown)
    factors = {change.peer_id: change.compute_factor for change in changes}
    will = _Foreseen(run, moment.machines, machines, factors, names.shown)
    gone = [PeerLost(change.peer_id) for change in changes if change.is_gone]
    return Comparison(
        run_id=run_id,
        step=run.past.all_steps,
        num_steps=run.spec.train.num_steps,
        changes=tuple(names.in_text(change.text, MAX_LINE_BYTES) for change in changes),
        baseline=_outlook(moment.state, run, was, [], names),
        changed=_outlook(state, run, will, gone, names),
        unknown=will.unknown(run),
    )


def _machine(machine: Machine, change: Change) -> Machine:
    up, down = change.up_bytes_per_s, change.down_bytes_per_s
    return replace(
        machine,
        up_bytes_per_s=machine.up_bytes_per_s if up is None else up,
        down_bytes_per_s=machine.down_bytes_per_s if down is None else down,
        flops_per_s=machine.flops_per_s * change.compute_factor,
    )


def _with_change(state: SwarmState, change: Change) -> SwarmState:
    """Apply a change to the state: the peer's limit of its link."""
    member = state.members[change.peer_id]
    hello = member.hello
    up, down = change.up_bytes_per_s, change.down_bytes_per_s
    hello = replace(
        hello,
        max_up_bytes_per_s=hello.max_up_bytes_per_s if up is None else up,
        max_down_bytes_per_s=hello.max_down_bytes_per_s if down is None else down,
    )
    return state.with_member(replace(member, hello=hello))


# ---- durations


class _Foreseen:
    """The durations of `running_on.Speeds`, from measurements scaled by two forecasts.

    Args:
        run: The run before the change.
        before: Measurements of the members.
        machines: Measurements with the change.
        factors: Factors of the computing speed, by peer.
        name_of: Function from a peer's id to its name for people.
    """

    def __init__(
        self,
        run: Run,
        before: Mapping[PeerId, Machine],
        machines: Mapping[PeerId, Machine],
        factors: Mapping[PeerId, float],
        name_of: Callable[[str], str],
    ) -> None:
        self._name_of = name_of
        self._machines = machines
        self._factors = factors
        self._known: dict[object, tuple[float, str]] = {}
        self._seconds, self._stages = run.measured.seconds, run.computing
        self._took_s = fmean(run.measured.step_seconds) if run.measured.step_seconds else None
        self._was_s, _ = _forecast(run, before, name_of) if run.computing else (0.0, "")

    def step_s(self, run: Run) -> float:
        """See `Speeds`."""
        will_s, _ = self._step(run)
        if self._took_s is None:
            return will_s
        return forecast_after_change_s(self._took_s, self._was_s, will_s)

    def bound_by(self, run: Run) -> str:
        """Return the bottleneck of a step; empty if unknown."""
        seconds, words = self._step(run)
        return words if seconds else ""

    def load_s(self, run: Run, peer_id: PeerId) -> float:
        """See `Speeds`."""
        layers = next(one.layers for one in run.attempt.assignments if one.peer_id == peer_id)
        rate = self._machines.get(peer_id, Machine()).down_bytes_per_s or LOAD_BYTES_PER_S
        return 1.0 + state_bytes(run.spec, layers) / rate

    def compute_s(self, run: Run, peer_id: PeerId) -> float:
        """See `Speeds`."""
        known = self._seconds  # By now the run's own seconds come from this simulation.
        measured = known.get(peer_id) or tuple(s for of in known.values() for s in of)
        factor = self._factors.get(peer_id, 1.0) / self._more_layers(run, peer_id)
        return share_of(run, peer_id) * expected_s(measured) / factor if measured else 0.0

    def _more_layers(self, run: Run, peer_id: PeerId) -> float:
        """Return the peer's work per microbatch, relative to the time of the measurement."""
        had, has = (
            [stage.layers for stage in stages if peer_id in stage.peers]
            for stages in (self._stages, run.computing)
        )
        if not had or not has:
            return 1.0
        return stage_flops(run.spec, has[0]) / stage_flops(run.spec, had[0])

    def unknown(self, run: Run) -> tuple[str, ...]:
        """Return the missing measurements except watts, which the simulation does not need."""
        placed = _placed(run, self._machines)
        metered = [replace(one, machine=replace(one.machine, watts=1.0)) for one in placed]
        return forecast(run.spec, metered).unknown

    def _step(self, run: Run) -> tuple[float, str]:
        is_first = run.is_in_first_epoch
        key = run.computing, is_first
        if key not in self._known:
            self._known[key] = (
                _forecast(run, self._machines, self._name_of) if run.computing else (0.0, "")
            )
        return self._known[key]


def _forecast(
    run: Run, machines: Mapping[PeerId, Machine], name_of: Callable[[str], str]
) -> tuple[float, str]:
    """Return the least seconds of a step, and its bottleneck."""
    spec = run.spec_at(run.past.all_steps + 1)
    found = forecast(spec, _placed(run, machines), name_of=name_of)
    is_first = run.is_in_first_epoch
    return found.first_step_s if is_first else found.step_s, found.bound_by


def _placed(run: Run, machines: Mapping[PeerId, Machine]) -> list[PlacedPeer]:
    return [
        PlacedPeer(
            peer_id=peer,
            layers=stage.layers,
            memory_bytes=0,
            machine=machines.get(peer, Machine()),
        )
        for stage in run.computing
        for peer in stage.peers
    ]


# ---- results


def _outlook(
    state: SwarmState, run: Run, speeds: _Foreseen, events: Iterable[Event], names: MemberNames
) -> Projection:
    went = simulate_from(state, run.run_id, speeds, events)
    after = went.state.runs.get(run.run_id, run)
    half = went.step_s[len(went.step_s) // 2 :]
    step_s = fmean(half) if half else None
    left = run.spec.train.num_steps - after.past.all_steps
    return Projection(
        num_steps=len(went.step_s),
        step_s=step_s,
        eta_s=None if step_s is None else went.seconds + left * step_s,
        bound_by=speeds.bound_by(after) if after.computing else "",
        plans=tuple(_plans(went, run, names)),
        pipeline=_pipeline(after, names.shown) or "no peers at work",
    )


def _plans(went: SimulationResult, run: Run, names: MemberNames) -> Iterator[tuple[float, str]]:
    """Yield the decisions about the run and the members."""
    for after_s, one in went.happened:
        if one.kind in _OF_PLANS and one.run_id in (None, run.run_id):
            yield after_s, names.in_text(event_in_words(one.kind, one.reason), MAX_LINE_BYTES)


def _pipeline(run: Run, name_of: Callable[[str], str]) -> str:
    """Describe the stages with their peers and the microbatches of each."""
    stages = (
        f"layers {stage.layers}: "
        + ", ".join(f"{name_of(peer)} ({share_of(run, peer)} a step)" for peer in stage.peers)
        for stage in run.computing
    )
    return "; ".join(stages)
