"""What would come of a change, from a moment on: the swarm run on with it, and without. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from swarm_ft.client.forecast import forecast
from swarm_ft.coordinator.facts.events import Event, PeerLost
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.member_names import NO_NAMES, MemberNames
from swarm_ft.coordinator.plan.lateness import state_bytes
from swarm_ft.coordinator.plan.routes import expected_s
from swarm_ft.coordinator.replay import Moment
from swarm_ft.coordinator.running_on import Went, run_on, share_of
from swarm_ft.coordinator.words import event_in_words
from swarm_ft.errors import BadOption
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.machines.step_time import foreseen_s
from swarm_ft.protocol.messages.capacity import Machine, PlacedPeer
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.spec.flops import stage_flops

BYTES_PER_S = 1e6 / 8
"""Of one Mbps."""
LOAD_BYTES_PER_S = 100 * BYTES_PER_S
"""At which a stage's state comes, where nobody measured the link."""
EXPECTED = (
    "expected 'peer NAME: 20 Mbps', 'peer NAME: 20 Mbps up', 'peer NAME: 2x compute' or "
    "'peer NAME: gone'"
)
_WORDS = re.compile(
    r"peer\s+(?P<peer>\S+?)\s*:\s*(?:(?P<gone>gone)|(?P<mbps>\d+(?:\.\d+)?)\s*Mbps"
    r"(?:\s+(?P<way>up|down))?|(?P<factor>\d+(?:\.\d+)?)\s*x\s+compute)",
    re.IGNORECASE,
)
_OF_PLANS = frozenset(EventKind) - {EventKind.SNAPSHOT_WHOLE, EventKind.RUN_EVALUATED}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Of one peer; what is None stays as it was.

    Attributes:
        words: as it was asked for.
    """

    words: str
    peer_id: PeerId
    is_gone: bool = False
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    compute_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """How a run goes on.

    Attributes:
        num_steps: that were simulated.
        step_s: the mean of the second half of them; None if there was none.
        eta_s: until the run's last step; None if nobody can tell.
        bound_by: what no step can be faster for; empty where nobody measured that.
        plans: what was decided meanwhile, and after how many seconds.
        pipeline: who hosts what in the end, and computes how many microbatches of a step.
    """

    num_steps: int
    step_s: float | None
    eta_s: float | None
    bound_by: str
    plans: tuple[tuple[float, str], ...]
    pipeline: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A run with changes, beside the same run without.

    Attributes:
        unknown: what nobody measured, in words; it bounds nothing.
    """

    run_id: RunId
    step: int
    num_steps: int
    changes: tuple[str, ...]
    without: Outlook
    changed: Outlook
    unknown: tuple[str, ...]


def change_of(words: str, state: SwarmState, names: MemberNames = NO_NAMES) -> Change:
    """What is asked for.

    Args:
        words: such as "peer NAME: 20 Mbps"; the first letters of an id will do, where they are one
            peer's.
        state: who is there.
        names: Names of members for people.

    Raises:
        BadOption: it is nothing of that kind, or there is no such peer.
    """
    found = _WORDS.fullmatch(words.strip())
    if found is None:
        raise BadOption(f"--what-if {ascii(words)[:80]}: {EXPECTED}")
    factor = float(found["factor"] or 1.0)
    rate = None if found["mbps"] is None else float(found["mbps"]) * BYTES_PER_S
    if factor <= 0.0 or rate == 0.0:
        raise BadOption(f"--what-if {ascii(words)[:80]}: expected more than 0")
    return Change(
        words=words,
        peer_id=_named(words, found["peer"], state, names),
        is_gone=found["gone"] is not None,
        up_bytes_per_s=rate if found["way"] != "down" else None,
        down_bytes_per_s=rate if found["way"] != "up" else None,
        compute_factor=factor,
    )


def _named(words: str, name: str, state: SwarmState, names: MemberNames) -> PeerId:
    meant = [peer for peer in state.members if peer == name]
    found = names.found(name)
    meant = meant or [
        peer
        for peer in state.members
        if peer in found or peer.startswith(name) or name == names.shown(peer)
    ]
    if len(meant) != 1:
        known = ", ".join(map(names.shown, state.members)) or "nobody"
        raise BadOption(f"--what-if {ascii(words)[:80]}: expected one of those there: {known}")
    return meant[0]


def compared(moment: Moment, run_id: RunId, changes: Sequence[Change]) -> Compared:
    """A run from a moment on, with these changes and without.

    Raises:
        BadOption: the run does not train at that moment, and waits for no peers either.
    """
    run = moment.state.runs[run_id]
    if run.phase.is_over or not run.attempt.assignments:
        raise BadOption(
            f"--what-if: run {run_id} has nobody at work then: {run.phase.name.lower()}"
        )
    machines, state = dict(moment.machines), moment.state
    for change in changes:
        machines[change.peer_id] = _machine(machines.get(change.peer_id, Machine()), change)
        state = _with_change(state, change)
    was = _Foreseen(run, moment.machines, moment.machines, {})
    factors = {change.peer_id: change.compute_factor for change in changes}
    will = _Foreseen(run, moment.machines, machines, factors)
    gone = [PeerLost(change.peer_id) for change in changes if change.is_gone]
    return Compared(
        run_id=run_id,
        step=run.past.all_steps,
        num_steps=run.spec.train.num_steps,
        changes=tuple(change.words for change in changes),
        without=_outlook(moment.state, run, was, []),
        changed=_outlook(state, run, will, gone),
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
    """What decisions know of it: the peer lends no more of its link than that."""
    member = state.members[change.peer_id]
    hello = member.hello
    up, down = change.up_bytes_per_s, change.down_bytes_per_s
    hello = replace(
        hello,
        max_up_bytes_per_s=hello.max_up_bytes_per_s if up is None else up,
        max_down_bytes_per_s=hello.max_down_bytes_per_s if down is None else down,
    )
    return state.with_member(replace(member, hello=hello))


# ---- how long things take


class _Foreseen:
    """See `running_on.Speeds`: what was measured, and what a forecast says of the difference.

    Args:
        run: as it was.
        before: what members measured.
        machines: what they are to have.
        factors: by which peers compute faster.
    """

    def __init__(
        self,
        run: Run,
        before: Mapping[PeerId, Machine],
        machines: Mapping[PeerId, Machine],
        factors: Mapping[PeerId, float],
    ) -> None:
        self._machines = machines
        self._factors = factors
        self._known: dict[object, tuple[float, str]] = {}
        self._seconds, self._stages = run.measured.seconds, run.computing
        self._took_s = fmean(run.measured.step_seconds) if run.measured.step_seconds else None
        self._was_s, _ = _forecast(run, before) if run.computing else (0.0, "")

    def step_s(self, run: Run) -> float:
        """See `Speeds`."""
        will_s, _ = self._step(run)
        if self._took_s is None:
            return will_s
        return foreseen_s(self._took_s, self._was_s, will_s)

    def bound_by(self, run: Run) -> str:
        """What no step can be faster for."""
        seconds, words = self._step(run)
        return words if seconds else ""

    def load_s(self, run: Run, peer_id: PeerId) -> float:
        """See `Speeds`."""
        layers = next(one.layers for one in run.attempt.assignments if one.peer_id == peer_id)
        rate = self._machines.get(peer_id, Machine()).down_bytes_per_s or LOAD_BYTES_PER_S
        return 1.0 + state_bytes(run.spec, layers) / rate

    def compute_s(self, run: Run, peer_id: PeerId) -> float:
        """See `Speeds`."""
        known = self._seconds  # the run's own ones have come of this by now
        measured = known.get(peer_id) or tuple(s for of in known.values() for s in of)
        factor = self._factors.get(peer_id, 1.0) / self._more_layers(run, peer_id)
        return share_of(run, peer_id) * expected_s(measured) / factor if measured else 0.0

    def _more_layers(self, run: Run, peer_id: PeerId) -> float:
        """How many times as much a peer computes of a microbatch as when that was measured."""
        had, has = (
            [stage.layers for stage in stages if peer_id in stage.peers]
            for stages in (self._stages, run.computing)
        )
        if not had or not has:
            return 1.0
        return stage_flops(run.spec, has[0]) / stage_flops(run.spec, had[0])

    def unknown(self, run: Run) -> tuple[str, ...]:
        """What nobody measured, but for watts, which nobody asks for."""
        placed = _placed(run, self._machines)
        metered = [replace(one, machine=replace(one.machine, watts=1.0)) for one in placed]
        return forecast(run.spec, metered).unknown

    def _step(self, run: Run) -> tuple[float, str]:
        is_first = run.is_in_first_epoch
        key = run.computing, is_first
        if key not in self._known:
            self._known[key] = _forecast(run, self._machines) if run.computing else (0.0, "")
        return self._known[key]


def _forecast(run: Run, machines: Mapping[PeerId, Machine]) -> tuple[float, str]:
    """Seconds of a step, at least, and what it is bound by."""
    found = forecast(run.spec_at(run.past.all_steps + 1), _placed(run, machines))
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


# ---- what comes of it


def _outlook(state: SwarmState, run: Run, speeds: _Foreseen, events: Iterable[Event]) -> Outlook:
    went = run_on(state, run.run_id, speeds, events)
    after = went.state.runs.get(run.run_id, run)
    half = went.step_s[len(went.step_s) // 2 :]
    step_s = fmean(half) if half else None
    left = run.spec.train.num_steps - after.past.all_steps
    return Outlook(
        num_steps=len(went.step_s),
        step_s=step_s,
        eta_s=None if step_s is None else went.seconds + left * step_s,
        bound_by=speeds.bound_by(after) if after.computing else "",
        plans=tuple(_plans(went, run)),
        pipeline=_pipeline(after) or "nobody is at work",
    )


def _plans(went: Went, run: Run) -> Iterator[tuple[float, str]]:
    """What was decided, as far as it is about the run or a member."""
    for after_s, one in went.happened:
        if one.kind in _OF_PLANS and one.run_id in (None, run.run_id):
            yield after_s, event_in_words(one.kind, one.reason)


def _pipeline(run: Run) -> str:
    """Who hosts what, and how many microbatches of a step each computes."""
    stages = (
        f"layers {stage.layers}: "
        + ", ".join(f"{peer} ({share_of(run, peer)} a step)" for peer in stage.peers)
        for stage in run.computing
    )
    return "; ".join(stages)
