"""Inputs of forecasts: placements of jobs, and measurements of machines, links and steps.

A request starts no run, and measurements affect no decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from swarm_ft.base.clock import Clock
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.member_names import NO_NAMES, MemberNames
from swarm_ft.coordinator.plan.learned_costs import (
    PeerLoad,
    RunMeasurements,
    costs_of,
    load_on,
    with_new_steps,
)
from swarm_ft.coordinator.plan.neighbours import relayed_percent, with_better_neighbours
from swarm_ft.coordinator.plan.placement import SETTLE_S, place
from swarm_ft.coordinator.reason_texts import as_text
from swarm_ft.errors import BadInput, Busy, MalformedMessage, NotFound, OutOfTurn, Unavailable
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.machines.rate import Rate
from swarm_ft.protocol.messages.capacity import (
    MAX_LEFT_S,
    MAX_PLACED,
    LinkEcho,
    LinkSample,
    Machine,
    Placed,
    PlacedPeer,
    PlaceRequest,
)
from swarm_ft.protocol.messages.control import PeerHello, StageAssignment
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.sizes import format_size
from swarm_ft.transport.admission import address_of
from swarm_ft.transport.base import MessageStream
from swarm_ft.transport.rules import may_read

MAX_SAMPLES = 520
"""Messages of one measurement, each way: 16 MiB, and a few to measure the round trip."""
MEASURE_S = 20.0
MEASURES_PER_S, MEASURES_BURST = 1 / 60, 12
"""Measurements of one peer, or of an address with an invitation; each forecast takes several."""
PLACES_PER_S, PLACES_BURST = 1.0, 8

MAX_LEARNED = 16
"""Newest runs from which a step's costs are learned."""

PlaceStream = MessageStream[Placed, PlaceRequest]
MeasureStream = MessageStream[LinkEcho, LinkSample]


class Capacity:
    """Handlers of `Place` and `MeasureLink`.

    Args:
        clock: Clock of the coordinator.
        state: Function that returns the present state.
        names: Names of members for people.
    """

    def __init__(
        self, clock: Clock, state: Callable[[], SwarmState], names: MemberNames = NO_NAMES
    ) -> None:
        self._names = names
        self._clock = clock
        self._state = state
        self._places: Rate[str] = Rate(per_s=PLACES_PER_S, burst=PLACES_BURST)
        self._measures: Rate[str] = Rate(per_s=MEASURES_PER_S, burst=MEASURES_BURST)
        self._measuring = asyncio.Lock()
        self._machines: dict[PeerId, Machine] = {}
        self._seen: dict[RunId, RunMeasurements] = {}

    def on_machine_report(self, peer_id: PeerId, machine: Machine) -> bool:
        """Store a member's report of its machine; return whether more than its load is new."""
        before = self._machines.get(peer_id, Machine())
        self._machines[peer_id] = machine
        as_loaded = replace(
            before,
            demand=machine.demand,
            busy=machine.busy,
            uses=machine.uses,
            waits=machine.waits,
        )
        return as_loaded != machine

    @property
    def machines(self) -> Mapping[PeerId, Machine]:
        """Last reports of members."""
        return self._machines

    def measure_steps(self) -> None:
        """Measure the steps that runs made since the last call."""
        state = self._state()
        for run in state.active_runs:
            self._look_at(state, run)

    def _look_at(self, state: SwarmState, run: Run) -> None:
        before = self._seen.get(run.run_id)
        if before is not None and before.committed_steps == run.past.committed_steps:
            return
        after = with_new_steps(before, state, run, self._machines)
        if after is not None:
            self._seen.pop(run.run_id, None)
            self._seen[run.run_id] = after
            if len(self._seen) > MAX_LEARNED:
                del self._seen[next(iter(self._seen))]

    def forget_peer(self, peer_id: PeerId) -> None:
        """Drop the report of a former member."""
        self._machines.pop(peer_id, None)

    async def place(self, stream: PlaceStream) -> None:
        """Reply with a job's placement, as if it were submitted now.

        Raises:
            Busy: The caller sends requests too often.
        """
        self._places.check(_rate_key(stream), self._clock.now_s(), "plans are requested")
        request = await stream.receive()
        if request is None:
            raise OutOfTurn(f"{stream.remote}: expected a job to plan")
        await stream.send(self._placed(request, stream.caller))

    async def measure(self, stream: MeasureStream) -> None:
        """Receive a link's messages, then reply with as many bytes.

        Raises:
            Busy: Another peer measures its link now, or this one does too often.
            MalformedMessage: The peer sent more messages than one measurement has.
            Unavailable: The measurement takes too long.
        """
        self._measures.check(_rate_key(stream), self._clock.now_s(), "links are measured")
        if self._measuring.locked():  # two at once would measure each other
            raise Busy("another peer measures its link; try again in a second")
        async with self._measuring:
            try:
                async with asyncio.timeout(MEASURE_S):
                    await _echo(stream)
            except TimeoutError:
                raise Unavailable(
                    f"{stream.remote}: expected a measurement in {MEASURE_S:g} s; try again later"
                ) from None

    def _placed(self, request: PlaceRequest, caller: Caller | None) -> Placed:
        """Place a job as if all present members had settled, or report the peers of a run."""
        state = self._state()
        for run in tuple(state.runs.values())[-MAX_LEARNED:]:
            self._look_at(state, run)  # also runs that ended before a restart
        if request.run_id is not None:
            return self._hosted(request.run_id, caller)
        spec = request.spec
        members = tuple(state.members.values())
        placement = place(spec, members, self._clock.now_s() + SETTLE_S)
        placed = with_better_neighbours(spec, placement.assignments, state.members, state.ways)
        found = self._described(spec, placed, None)
        waits_s = [
            load_on(state, self._machines, one.peer_id).left_s
            for one in placed
            if len(state.hosted.get(one.peer_id, ())) > state.members[one.peer_id].hello.max_beside
        ]
        if waits_s:  # the other runs there are over by then
            alone = (_without_other_runs(one) for one in found.peers)
            starts_after_s = min(max(waits_s), MAX_LEFT_S)
            found = replace(found, peers=tuple(alone), starts_after_s=starts_after_s, beside_s=0.0)
        waiting = [run for run in state.going_runs if not run.attempt.assignments]
        reason = self._names.in_text(as_text(placement.reason))
        return replace(found, reason=reason, num_waiting=len(waiting))

    def _machine(self, peer_id: PeerId) -> Machine:
        return self._machines.get(peer_id, Machine())

    def _hosted(self, run_id: RunId, caller: Caller | None) -> Placed:
        """Return the peers that host a run.

        Raises:
            NotFound: There is no such run, or it is another client's.
        """
        run = self._state().runs.get(run_id)
        if run is None or not may_read(caller, run.owner, run.spec.train.readers):
            raise NotFound(f"{run_id} is not known here, or not yours")
        connected = [a for a in run.attempt.assignments if a.peer_id in self._state().members]
        return self._described(run.spec, connected, run_id)

    def _described(
        self, spec: RunSpec, placed: Sequence[StageAssignment], but: RunId | None
    ) -> Placed:
        """Describe these peers, and the load of other runs on them."""
        state = self._state()
        around = {p: load_on(state, self._machines, p, but) for p in (a.peer_id for a in placed)}
        peers = tuple(
            self._placed_peer(state, one, around[one.peer_id]) for one in placed[:MAX_PLACED]
        )
        left_s = max((one.left_s for one in around.values()), default=0.0)
        return Placed(
            peers=peers,
            reason="",
            relayed_percent=relayed_percent(spec, placed, state.ways),
            costs=costs_of(self._seen.values()),
            beside_s=min(left_s, MAX_LEFT_S),
            names=self._names.of((one.peer_id for one in peers), MAX_PLACED),
        )

    def _placed_peer(
        self, state: SwarmState, assignment: StageAssignment, load: PeerLoad
    ) -> PlacedPeer:
        machine = self._machine(assignment.peer_id)
        shared = load.share_link(machine)
        return PlacedPeer(
            peer_id=assignment.peer_id,
            layers=assignment.layers,
            memory_bytes=state.members[assignment.peer_id].hello.memory_bytes,
            machine=machine,
            num_runs=load.num_runs,
            busy=load.busy,
            host_busy=load.host_busy,
            host_load=load.host_load,
            shared_up_bytes_per_s=shared.up_bytes_per_s if load.num_runs else 0.0,
            shared_down_bytes_per_s=shared.down_bytes_per_s if load.num_runs else 0.0,
        )


def _without_other_runs(peer: PlacedPeer) -> PlacedPeer:
    return replace(
        peer,
        num_runs=0,
        busy=0.0,
        host_busy=0.0,
        shared_up_bytes_per_s=0.0,
        shared_down_bytes_per_s=0.0,
    )


def check_lent(hello: PeerHello) -> None:
    """Refuse a peer that offers more memory than its device has by its own report.

    Raises:
        BadInput: The offer is too large; the error names both sizes and the option that lowers it.
    """
    has_bytes = hello.device_memory_bytes
    if has_bytes and hello.memory_bytes > has_bytes:
        raise BadInput(
            f"peer {hello.peer_id}: expected at most {format_size(has_bytes)}, the memory of its "
            f"device, got {format_size(hello.memory_bytes)}; lower --memory"
        )


def _rate_key(stream: PlaceStream | MeasureStream) -> str:
    """Return the name under which calls are counted; newcomers count by address."""
    if stream.caller is not None and stream.caller.role is not Role.NEWCOMER:
        return stream.caller.name
    return address_of(stream.remote.rpartition(":")[0])


async def _echo(stream: MeasureStream) -> None:
    """Reply to empty messages at once, for the round trip, and to all others at the end."""
    sizes: list[int] = []
    for _ in range(MAX_SAMPLES):
        sample = await stream.receive()
        if sample is None:
            break
        if sample.data:
            sizes.append(len(sample.data))
        else:
            await stream.send(LinkEcho())
    else:
        raise MalformedMessage(
            f"{stream.remote}: expected at most {MAX_SAMPLES} messages to measure a link"
        )
    await stream.send(LinkEcho())
    for size in sizes:
        await stream.send(LinkEcho(data=bytes(size)))
