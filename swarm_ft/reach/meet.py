"""A member's part in introductions: requests for streams to others, and answers to requests.

A meeting is one introduction: two members look for a stream between them. `ladder` decides which
ways it tries and lists them; this module owns the sockets. A leg is a member's connection to the
relay, which joins two legs to a relayed stream. The called side passes the stream to its own gRPC
through its front. The caller passes it to its own through `reach.tunnels`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from swarm_ft.base.clock import Clock
from swarm_ft.base.log import get_logger
from swarm_ft.errors import SwarmError, Unavailable
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.protocol.messages.meeting import (
    MAX_ENDPOINTS,
    FromMember,
    Linked,
    Meet,
    MeetingRequest,
    NoMeeting,
    Punch,
    Reachable,
    RelayDistance,
    RelayDistances,
    RelayPlace,
    Relays,
    ToMember,
    Way,
)
from swarm_ft.protocol.spec.addresses import Vantage, is_socket_address, may_dial_endpoint
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.reach.distances import measure_distances
from swarm_ft.reach.front import Front
from swarm_ft.reach.ladder import Connect, Dial, Effects, GiveUp, Ladder, OpenLeg, Take
from swarm_ft.reach.sockets import (
    CHOSEN,
    GREETING_S,
    LEG,
    MAGIC,
    PAIR,
    PROOF_BYTES,
    Address,
    dial,
    endpoint_of,
    exchange_proofs,
    outside_address,
    proof,
    receive_address,
    receive_exactly,
)
from swarm_ft.reach.vantage import resolve_endpoints, vantage_towards
from swarm_ft.transport.base import MessageStream, Transport, until_one_ends
from swarm_ft.transport.methods import INTRODUCE

logger = get_logger(__name__)

MIN_RETRY_S, MAX_RETRY_S = 0.25, 2.0
"""Seconds between two calls of a coordinator that does not answer."""
PUNCH_EVERY_S, PUNCH_S = 0.1, 3.0
"""Seconds between two tries to punch, and for all tries: the other side may begin later."""
EARLY_S = 2.0
"""Seconds that a stream waits for the coordinator's message on its meeting."""
WANTED_S = 20.0
"""Seconds that a caller waits for a stream, the coordinator's answer included."""
HOPELESS_S = 300.0
"""Seconds after a failed punch in which meetings with the same member do not wait for another."""
MEASURED_EVERY_S = 600.0
"""Seconds, about, between two measurements of the distance to relays."""
SPREAD_S = 1.0
"""Seconds over which all members spread their measurement of a new relay."""
SPARE_S = 300.0
"""Seconds until the first byte on a chosen stream. The caller may keep it as a spare for a while.
"""
MAX_MEETINGS, MAX_MEETINGS_WITH = 128, 16
"""Meetings at once: of all members, and with one member, which may be hostile."""
MAX_PUNCHES = 32
"""Loops of `_Meeting._punch` at once, of up to 30 SYNs each; more meetings use the relay."""
MAX_SPARE = 64
"""Spare streams at once; further ones get only the time of any new connection, `GREETING_S`."""

Stream = MessageStream[FromMember, ToMember]


@dataclass(frozen=True, slots=True)
class Link:
    """A stream to another member, with the way that it takes."""

    sock: socket.socket
    way: Way


class Reach:
    """A member's part in introductions; see the module's docstring.

    Args:
        transport: Connects to the coordinator.
        find_coordinator: Returns the coordinator's endpoint.
        front: Receives others' streams, and passes them to gRPC.
        clock: Source of the time.
        rng: Random numbers that keep members from calling in step.
    """

    def __init__(
        self,
        transport: Transport,
        find_coordinator: Callable[[], Awaitable[str]],
        front: Front,
        clock: Clock,
        rng: Random,
    ) -> None:
        self._transport = transport
        self._find_coordinator = find_coordinator
        self._front = front
        self._clock = clock
        self._rng = rng
        self._tasks: set[asyncio.Task[Any]] = set()
        # The coordinator, and what it knows of this member.
        self.trouble = ""
        """Why the coordinator makes no introductions; empty while it does."""
        self.joined = asyncio.Event()
        """Whether the coordinator can introduce this member now."""
        self._outbox: asyncio.Queue[FromMember] = asyncio.Queue()
        self._mapped_endpoints: tuple[str, ...] = ()  # at the router
        self._own_endpoints: tuple[str, ...] = ()
        self._vantage = Vantage()
        self._reachable = Reachable()
        # This member's router, and the relays.
        self.knows_mapping = asyncio.Event()
        """Whether the router's way of mapping ports is known, as far as it can be."""
        self.has_mapping_answer = asyncio.Event()
        """Set unless a request for a port still waits for the router's answer."""
        self.has_mapping_answer.set()
        self.relays: tuple[RelayPlace, ...] = ()
        """Relays of the swarm, from the coordinator's last message."""
        self._distances: dict[str, float] = {}  # round trips of relays, by endpoint
        self._probing_relays: asyncio.Task[None] | None = None
        # Meetings, by number and by the proof that the other side shows at the front.
        self._wanted: dict[str, deque[asyncio.Future[Link]]] = {}  # callers of `link`, by member
        self._meetings: dict[bytes, _Meeting] = {}
        self._by_proof: dict[bytes, _Meeting] = {}
        self._meeting_began = asyncio.Condition()
        self._punches = asyncio.Semaphore(MAX_PUNCHES)
        self._hopeless: dict[str, tuple[frozenset[Way], float]] = {}  # ways and since when
        # Streams from other members.
        self._num_spare = 0
        self._num_relayed: Counter[str] = Counter()
        front.on_pair(self._on_meeting_connection)

    async def run(self, endpoints: tuple[str, ...]) -> None:
        """Take part in introductions, until cancelled.

        Args:
            endpoints: Endpoints of the front for others, with names or addresses.
        """
        reason = ""
        try:
            while True:
                try:
                    await self._take_part(endpoints)
                except SwarmError as error:  # the coordinator returns, or is found anew
                    if error.message != reason:
                        logger.warning("introductions: %s; retrying", error.message)
                    reason = self.trouble = error.message
                await asyncio.sleep(self._rng.uniform(MIN_RETRY_S, MAX_RETRY_S))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def is_relayed(self, name: str) -> bool:
        """Whether a stream from this member to here goes over a relay."""
        return self._num_relayed[name] > 0

    @property
    def reachable(self) -> Reachable:
        """Endpoints of this member and its router's behaviour, as others learn them."""
        return self._reachable

    def add_endpoint(self, endpoint: str) -> None:
        """Add an endpoint of the front that a router reported; others try it first."""
        if not is_socket_address(endpoint):
            logger.info("the router reports %s, which is no address of one machine", endpoint)
            return
        self._mapped_endpoints = (endpoint, *self._mapped_endpoints)
        self._update(self._with_endpoints())

    async def link(self, name: str) -> Link:
        """Return a stream to this member, by any way.

        Raises:
            Unavailable: The member is not there, or there is no way to it.
        """
        wanted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(WANTED_S):
                await self.joined.wait()
                self._wanted.setdefault(name, deque()).append(wanted)
                self._outbox.put_nowait(MeetingRequest(name=name))
                return await wanted
        except TimeoutError:
            raise Unavailable(f"no way to {name} was found in {WANTED_S:g} s") from None
        finally:
            wanted.cancel()

    # ---- the stream to the coordinator

    async def _take_part(self, endpoints: tuple[str, ...]) -> None:
        """Open a stream to the coordinator, and handle its messages until the stream ends."""
        coordinator = await self._find_coordinator()
        self._vantage = await vantage_towards(coordinator)
        # Resolved each time, since a name may lead elsewhere now.
        self._own_endpoints = await resolve_endpoints(endpoints)
        self._reachable = self._with_endpoints()
        channel = self._transport.connect(coordinator, COORDINATOR_NAME)
        try:
            stream = channel.open(INTRODUCE)
            while not self._outbox.empty():
                self._outbox.get_nowait()  # about meetings of an earlier stream
            await stream.send(self._reachable)
            await until_one_ends(self._write(stream), self._read(stream))
        finally:
            self.joined.clear()
            self._fail_wanted()
            await channel.close()

    def _fail_wanted(self) -> None:
        """Fail all callers of `link`, since their answers are lost; they try again."""
        for name in list(self._wanted):
            is_waiting = True
            while is_waiting:
                broken = Unavailable(f"no introduction to {name}: the stream broke")
                is_waiting = self._answer(name, broken)

    async def _write(self, stream: Stream) -> None:
        while True:
            await stream.send(await self._outbox.get())

    async def _read(self, stream: Stream) -> None:
        while (message := await stream.receive()) is not None:
            match message:
                case Relays():
                    self.relays, self.trouble = message.places, ""
                    self.joined.set()
                    if self._probing_relays is not None:
                        self._probing_relays.cancel()
                    self._probing_relays = self._start(self._probe_relays(message))
                case Meet():
                    await self._meet(message)
                case Punch(meeting=number):
                    if number in self._meetings:
                        self._meetings[number].on_punch(message)
                case NoMeeting(name=name, reason=reason):
                    self._answer(name, Unavailable(f"peer {name}: {reason}"))

    async def _probe_relays(self, relays: Relays) -> None:
        """Measure the router's way of mapping ports, and the distances to relays, repeatedly."""
        if self.knows_mapping.is_set():
            await asyncio.sleep(self._rng.uniform(0.0, SPREAD_S))
        while True:
            await self._learn_mapping(relays)
            self._distances = await measure_distances(relays.places)
            self._send_distances()
            await asyncio.sleep(self._rng.uniform(0.75, 1.25) * MEASURED_EVERY_S)

    def _send_distances(self) -> None:
        found = (RelayDistance(endpoint=e, round_trip_s=s) for e, s in self._distances.items())
        if self.joined.is_set():  # otherwise a measurement follows the next join
            self._outbox.put_nowait(RelayDistances(distances=tuple(found)))

    def _unreached(self, relay: str) -> None:
        """Forget a relay that had no place for a leg, so that the next meeting uses another one."""
        if self._distances.pop(relay, None) is not None:
            self._send_distances()

    async def _learn_mapping(self, relays: Relays) -> None:
        """Find out whether this machine's router maps each destination to another port."""
        for place in relays.places:
            try:
                one, port = await outside_address(place.endpoint)
                other, _ = await outside_address(place.probe_endpoint, port=port)
            except (OSError, TimeoutError, SwarmError):
                continue
            varies = one != other
            if varies != self._reachable.mapping_varies:
                self._update(replace(self._reachable, mapping_varies=varies))
            break
        self.knows_mapping.set()

    def _with_endpoints(self) -> Reachable:
        found = tuple(dict.fromkeys((*self._mapped_endpoints, *self._own_endpoints)))
        return replace(self._reachable, endpoints=found[:MAX_ENDPOINTS])

    def _update(self, reachable: Reachable) -> None:
        self._reachable = reachable
        if self.joined.is_set():  # otherwise it is the first message of the next stream
            self._outbox.put_nowait(reachable)

    # ---- meetings

    async def _meet(self, meet: Meet) -> None:
        if len(self._meetings) >= MAX_MEETINGS or meet.meeting in self._meetings:
            return
        if sum(other.name == meet.name for other in self._meetings.values()) >= MAX_MEETINGS_WITH:
            logger.debug("%s asks for more than %d meetings", meet.name, MAX_MEETINGS_WITH)
            return
        meet = self._checked(meet)
        hopeless = self._hopeless_ways(meet)
        shared = _Shared(self._clock, self._outbox.put_nowait, self._unreached, self._punches)
        meeting = _Meeting(meet, shared, hopeless)
        their_proof = proof(meet.meeting, is_caller=not meet.is_caller)
        self._meetings[meet.meeting] = self._by_proof[their_proof] = meeting
        self._start(self._attend(meet, meeting, their_proof))
        async with self._meeting_began:
            self._meeting_began.notify_all()

    def _checked(self, meet: Meet) -> Meet:
        """Return the meeting without endpoints that this member's own network rules out."""
        seen = filter(self._vantage.may_dial, meet.endpoints)
        in_house = filter(self._vantage.is_in_house, meet.house_endpoints)
        return replace(meet, endpoints=tuple(seen), house_endpoints=tuple(in_house))

    async def _attend(self, meet: Meet, meeting: _Meeting, their_proof: bytes) -> None:
        """Run a meeting, and pass its stream to the caller of `link` or to this side's gRPC."""
        try:
            link = await meeting.run()
        except SwarmError as error:
            if meet.is_caller:
                self._answer(meet.name, error)
            return
        finally:
            del self._meetings[meet.meeting], self._by_proof[their_proof]
        self._remember_punch(meet, link.way)
        if not meet.is_caller:
            await self._serve(link, meet.name)
        elif not self._answer(meet.name, link):
            link.sock.close()

    async def _serve(self, link: Link, name: str) -> None:
        """Pass the stream to gRPC at its first byte; the caller may keep it for later."""
        sock = link.sock
        self._num_spare += 1
        try:
            async with asyncio.timeout(SPARE_S if self._num_spare <= MAX_SPARE else GREETING_S):
                first = await receive_exactly(sock, 1)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError | TimeoutError):
                raise
            return
        finally:
            self._num_spare -= 1
        self._num_relayed[name] += link.way is Way.RELAYED
        try:
            await self._front.serve(sock, sock.getpeername()[:2], first)
        except OSError:
            pass  # gRPC stops, or the other side is gone
        finally:
            self._num_relayed[name] -= link.way is Way.RELAYED

    def _hopeless_ways(self, meet: Meet) -> frozenset[Way]:
        ways, since_s = self._hopeless.get(meet.name, (frozenset(), 0.0))
        return ways if self._clock.now_s() - since_s < HOPELESS_S else frozenset()

    def _remember_punch(self, meet: Meet, way: Way) -> None:
        """Remember that a punch failed, if the meeting ended with a relayed stream."""
        if way is not Way.RELAYED:
            self._hopeless.pop(meet.name, None)
        elif meet.may_punch and not self._hopeless_ways(meet):
            self._hopeless[meet.name] = frozenset({Way.PUNCHED}), self._clock.now_s()

    def _answer(self, name: str, answer: Link | SwarmError) -> bool:
        """Pass the answer to the first caller that waits for this member, if there is one."""
        waiting = self._wanted.get(name, deque())
        while waiting:
            wanted = waiting.popleft()
            if wanted.done():
                continue
            if isinstance(answer, Link):
                wanted.set_result(answer)
            else:
                wanted.set_exception(answer)
            return True
        self._wanted.pop(name, None)
        return False

    async def _on_meeting_connection(self, sock: socket.socket, remote: Address) -> None:
        """Handle a connection at this member's front, whose proof names its meeting."""
        async with asyncio.timeout(GREETING_S):
            shown = await receive_exactly(sock, PROOF_BYTES)
        async with asyncio.timeout(EARLY_S), self._meeting_began:
            await self._meeting_began.wait_for(lambda: shown in self._by_proof)
        self._front.keep(sock, remote)  # not dropped in favour of newer connections
        await self._by_proof[shown].on_connection(sock)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@dataclass(frozen=True, slots=True)
class _Shared:
    """Parts of `Reach` that all meetings of a member share.

    Attributes:
        clock: Source of the time.
        send: Sends a message to the coordinator.
        unreached: Called with a relay that has no place for a leg.
        punches: Bound on loops of `_Meeting.punch`.
    """

    clock: Clock
    send: Callable[[FromMember], None]
    unreached: Callable[[str], None]
    punches: asyncio.Semaphore


class _Meeting:
    """Sockets of one meeting, driven by its ladder."""

    def __init__(self, meet: Meet, shared: _Shared, hopeless: frozenset[Way]) -> None:
        self._meet = meet
        self._clock = shared.clock
        self._send = shared.send
        self._unreached = shared.unreached
        self._punches = shared.punches
        self._began_s = self._clock.now_s()
        self._ladder = Ladder(meet, self._began_s, hopeless)
        self.name = meet.name
        self._streams: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._leg_port, self._relay_host = 0, ""
        self._changed = asyncio.Event()
        self._taken: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def run(self) -> Link:
        """Return the stream of the meeting.

        Raises:
            Unavailable: There is none.
        """
        self._do(self._ladder.begin())
        try:
            while not self._taken.done():
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, self._ladder.due_s - self._clock.now_s())):
                        await self._changed.wait()
                self._do(self._ladder.tick(self._clock.now_s()))
            link = self._taken.result()
            await self._confirm(link)
        finally:
            await self._close()
        return link

    def on_punch(self, punch: Punch) -> None:
        """Record the other side's address at the relay."""
        self._do(self._ladder.on_punch(punch))

    async def on_connection(self, sock: socket.socket) -> None:
        """Handle a connection of the other side: prove this side's part in the meeting as well."""
        mine = MAGIC + PAIR + proof(self._meet.meeting, is_caller=self._meet.is_caller)
        await asyncio.get_running_loop().sock_sendall(sock, mine)
        self._opened(sock, Way.REVERSE if self._meet.is_caller else Way.DIRECT)

    async def _confirm(self, link: Link) -> None:
        """Send the caller's choice of this stream to the other side, and report it."""
        if not self._meet.is_caller:
            return
        took_s = self._clock.now_s() - self._began_s
        try:
            await asyncio.get_running_loop().sock_sendall(link.sock, CHOSEN)
        except OSError as error:
            link.sock.close()
            raise Unavailable(f"the stream to {self._meet.name} broke: {error}") from None
        self._send(Linked(meeting=self._meet.meeting, way=link.way, took_s=took_s))
        log = logger.debug if link.way is Way.DIRECT else logger.info
        log("reaches %s %s, after %.0f ms", self._meet.name, link.way, took_s * 1000)

    async def _close(self) -> None:
        """Close all streams but the chosen one."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        has_result = self._taken.done() and not self._taken.cancelled()
        chosen = self._taken.result().sock if has_result and not self._taken.exception() else None
        for sock in self._streams:
            if sock is not chosen:
                sock.close()

    # ---- the ladder's effects

    def _do(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Dial(endpoint, way):
                    self._start(self._dial(endpoint, way))
                case OpenLeg(relay, ticket):
                    self._start(self._open_leg(relay, ticket))
                case Connect(address):
                    self._start(self._punch(address))
                case Take(number, way):
                    self._taken.set_result(Link(self._streams[number], way))
                case GiveUp(reason):
                    self._taken.set_exception(Unavailable(reason))
        self._changed.set()

    async def _dial(self, endpoint: str, way: Way) -> None:
        sock = await dial(endpoint)
        try:
            await self._prove(sock)
        except BaseException:
            sock.close()
            raise
        self._opened(sock, way)

    async def _open_leg(self, relay: str, ticket: bytes) -> None:
        """Connect to the relay, and wait for the first byte of the joined legs."""
        has_reported, began_s = False, self._clock.now_s()
        try:
            sock = await dial(relay)
            self._streams.append(sock)
            await self._show(ticket, sock)
            has_reported = True
            # The measured time has two round trips: one to connect, and one for the answer.
            self._do(self._ladder.on_leg_reported((self._clock.now_s() - began_s) / 2))
            await receive_exactly(sock, 1)
        except (OSError, TimeoutError, SwarmError):
            if not has_reported:
                self._unreached(relay)
            self._ladder.lost_leg()
            self._changed.set()
            raise
        self._opened(sock, Way.RELAYED)

    async def _show(self, ticket: bytes, sock: socket.socket) -> None:
        """Show a relay the ticket; its answer means that it reported the leg to the coordinator."""
        self._leg_port = sock.getsockname()[1]
        self._relay_host = host_of(endpoint_of(sock.getpeername()[:2]))
        shown = MAGIC + LEG + bytes([len(ticket)]) + ticket
        async with asyncio.timeout(GREETING_S):
            await asyncio.get_running_loop().sock_sendall(sock, shown)
            await receive_address(sock)

    async def _punch(self, address: str) -> None:
        """Open simultaneously from the leg's port, again and again, since a router may refuse."""
        # A relay at a public address sees no private addresses, so such a message is wrong.
        if self._punches.locked() or not may_dial_endpoint(self._relay_host, address):
            logger.debug("meeting %s: no punch to %s", self._meet.name, address)
            return
        async with self._punches, asyncio.timeout(PUNCH_S):
            while True:
                try:
                    sock = await dial(address, port=self._leg_port, timeout_s=PUNCH_S)
                except OSError:
                    await asyncio.sleep(PUNCH_EVERY_S)
                    continue
                try:
                    await self._prove(sock)
                except BaseException:
                    sock.close()
                    raise
                self._opened(sock, Way.PUNCHED)
                return

    async def _prove(self, sock: socket.socket) -> None:
        async with asyncio.timeout(GREETING_S):
            await exchange_proofs(sock, self._meet.meeting, is_caller=self._meet.is_caller)

    def _opened(self, sock: socket.socket, way: Way) -> None:
        if self._ladder.is_over:
            sock.close()
            return
        if sock not in self._streams:
            self._streams.append(sock)
        number = self._streams.index(sock)
        self._do(self._ladder.on_open(number, way, self._clock.now_s()))
        if not self._meet.is_caller:
            self._start(self._await_choice(number, way))

    async def _await_choice(self, number: int, way: Way) -> None:
        if await receive_exactly(self._streams[number], 1) == CHOSEN:
            self._do(self._ladder.on_chosen(number, way))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(_on_way_done, self._tasks))


def _on_way_done(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    """Forget the task of one way; its failure is ignored, since others may work."""
    tasks.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, OSError | TimeoutError | SwarmError):
        logger.error("a way failed", exc_info=error)
