"""A member's part in introductions: it asks for streams to others, and answers those who ask.

`ladder` decides for each meeting; this owns the sockets. Whoever is asked for hands the stream to
its own gRPC, through its front; whoever asked gives it to its own (`reach.tunnels`).
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

from swarm_ft.clock import Clock
from swarm_ft.errors import SwarmError, Unavailable
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.meeting import (
    MAX_ENDPOINTS,
    FromMember,
    Linked,
    Measured,
    Meet,
    NoMeeting,
    Punch,
    Reachable,
    RelayDistance,
    RelayPlace,
    Relays,
    ToMember,
    Want,
    Way,
)
from swarm_ft.protocol.spec.addresses import Vantage, is_socket_address, may_dial_endpoint
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.reach.distances import measured
from swarm_ft.reach.front import Front
from swarm_ft.reach.ladder import Connect, Dial, Effects, GiveUp, Ladder, LeaveLeg, Take
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
from swarm_ft.reach.vantage import resolved, vantage_towards
from swarm_ft.transport.base import MessageStream, Transport, until_one_ends
from swarm_ft.transport.methods import INTRODUCE

logger = get_logger(__name__)

MIN_RETRY_S, MAX_RETRY_S = 0.25, 2.0
"""Between calls of a coordinator that does not answer."""
PUNCH_EVERY_S, PUNCH_S = 0.1, 3.0
"""A punch that is refused is tried again so soon, for so long: the other side may be later."""
EARLY_S = 2.0
"""How long a stream of a meeting that is not known here yet waits for word of it."""
WANTED_S = 20.0
"""How long somebody waits for a stream, the coordinator's answer included."""
HOPELESS_S = 300.0
"""How long a way that did not work is not waited for."""
MEASURED_EVERY_S = 600.0
"""How often, about, a member looks how far relays are."""
SPREAD_S = 1.0
"""Over which all members look at a relay that is new."""
SPARE_S = 300.0
"""How long a stream is kept that a caller took and says nothing on: it waits for a step's end."""
MAX_MEETINGS, MAX_MEETINGS_WITH = 128, 16
"""At once: of all together, and with one other member, which may be hostile."""
MAX_PUNCHES = 32
"""Loops of `_Meeting.punch` at once, of up to 30 SYNs each: more meetings use the relay."""
MAX_SPARE = 64
"""Streams that wait to be used; more than these wait as long as any other that says nothing."""

Stream = MessageStream[FromMember, ToMember]


@dataclass(frozen=True, slots=True)
class Link:
    """A stream to another member, and how it was had."""

    sock: socket.socket
    way: Way


class Reach:
    """See the module's docstring.

    Args:
        transport: reaches the coordinator.
        find_coordinator: tells where it is.
        front: takes others' streams, and has gRPC answer them.
        clock: the time.
        rng: so that not all call in step.
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
        self._mapped: tuple[str, ...] = ()
        self._own: tuple[str, ...] = ()
        self._reachable = Reachable()
        self.relays: tuple[RelayPlace, ...] = ()
        """Those of the swarm, as far as it was told."""
        self.trouble = ""
        """Why the coordinator introduces nobody, as long as it does not."""
        self._outbox: asyncio.Queue[FromMember] = asyncio.Queue()
        self.joined = asyncio.Event()
        """Whether the coordinator can introduce this member now."""
        self.knows_mapping = asyncio.Event()
        """Whether it was found out what this machine's router does to ports, as far as it can."""
        self.has_asked_router = asyncio.Event()
        """Whether the router was asked for a port, where it is to be."""
        self.has_asked_router.set()
        self._wanted: dict[str, deque[asyncio.Future[Link]]] = {}
        self._meetings: dict[bytes, _Meeting] = {}
        self._by_proof: dict[bytes, _Meeting] = {}
        self._met = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._hopeless: dict[str, tuple[frozenset[Way], float]] = {}
        self._relayed: Counter[str] = Counter()
        self._distances: dict[str, float] = {}
        self._num_spare = 0
        self._vantage = Vantage()
        self._punches = asyncio.Semaphore(MAX_PUNCHES)
        self._looking: asyncio.Task[None] | None = None
        front.on_pair(self._visited)

    async def run(self, endpoints: tuple[str, ...]) -> None:
        """Be there for introductions, until cancelled.

        Args:
            endpoints: where others may reach the front, names or addresses.
        """
        reason = ""
        try:
            while True:
                try:
                    await self._converse(endpoints)
                except SwarmError as error:  # it comes back, or is found anew
                    if error.message != reason:
                        logger.warning("introductions: %s; trying on", error.message)
                    reason = self.trouble = error.message
                await asyncio.sleep(self._rng.uniform(MIN_RETRY_S, MAX_RETRY_S))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def is_relayed(self, name: str) -> bool:
        """Whether a stream that this member has to here goes over a relay."""
        return self._relayed[name] > 0

    @property
    def reachable(self) -> Reachable:
        """What others are told of this member."""
        return self._reachable

    def also_at(self, endpoint: str) -> None:
        """Add an endpoint of the front, as a router reports it; it is tried first."""
        if not is_socket_address(endpoint):
            logger.info("the router reports %s, which is no address of one machine", endpoint)
            return
        self._mapped = (endpoint, *self._mapped)
        self._tell(self._with_endpoints())

    async def link(self, name: str) -> Link:
        """A stream to this member, whichever way.

        Raises:
            Unavailable: it is not there, or there is no way to it.
        """
        wanted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(WANTED_S):
                await self.joined.wait()
                self._wanted.setdefault(name, deque()).append(wanted)
                self._outbox.put_nowait(Want(name=name))
                return await wanted
        except TimeoutError:
            raise Unavailable(f"no way to {name} was found in {WANTED_S:g} s") from None
        finally:
            wanted.cancel()

    # ---- the conversation with the coordinator

    async def _converse(self, endpoints: tuple[str, ...]) -> None:
        coordinator = await self._find_coordinator()
        self._vantage = await vantage_towards(coordinator)
        self._own = await resolved(endpoints)  # anew, since a name may lead elsewhere by now
        self._reachable = self._with_endpoints()
        channel = self._transport.connect(coordinator, COORDINATOR_NAME)
        try:
            stream = channel.open(INTRODUCE)
            while not self._outbox.empty():
                self._outbox.get_nowait()  # said of meetings that this coordinator knows nothing of
            await stream.send(self._reachable)
            await until_one_ends(self._write(stream), self._read(stream))
        finally:
            self.joined.clear()
            for name in list(self._wanted):  # nobody answers these any more; who wants to asks anew
                while self._answer(name, Unavailable(f"no introduction to {name}: it broke off")):
                    pass
            await channel.close()

    async def _write(self, stream: Stream) -> None:
        while True:
            await stream.send(await self._outbox.get())

    async def _read(self, stream: Stream) -> None:
        while (message := await stream.receive()) is not None:
            match message:
                case Relays():
                    self.relays, self.trouble = message.places, ""
                    self.joined.set()
                    if self._looking is not None:
                        self._looking.cancel()
                    self._looking = self._start(self._look_at(message))
                case Meet():
                    await self._meet(message)
                case Punch(meeting=number):
                    if number in self._meetings:
                        self._meetings[number].told(message)
                case NoMeeting(name=name, reason=reason):
                    self._answer(name, Unavailable(f"peer {name}: {reason}"))

    async def _look_at(self, relays: Relays) -> None:
        """What can be learnt at relays: what this machine's router does, and how far they are."""
        if self.knows_mapping.is_set():
            await asyncio.sleep(self._rng.uniform(0.0, SPREAD_S))
        while True:
            await self._learn_mapping(relays)
            self._distances = await measured(relays.places)
            self._tell_distances()
            await asyncio.sleep(self._rng.uniform(0.75, 1.25) * MEASURED_EVERY_S)

    def _tell_distances(self) -> None:
        told = (RelayDistance(endpoint=e, round_trip_s=s) for e, s in self._distances.items())
        if self.joined.is_set():  # or they are measured when the coordinator is there
            self._outbox.put_nowait(Measured(distances=tuple(told)))

    def _unreached(self, relay: str) -> None:
        """A leg found no place there: the next meeting is to be at another one."""
        if self._distances.pop(relay, None) is not None:
            self._tell_distances()

    async def _learn_mapping(self, relays: Relays) -> None:
        """Whether this machine's router gives each destination another port."""
        for place in relays.places:
            try:
                one, port = await outside_address(place.endpoint)
                other, _ = await outside_address(place.probe_endpoint, port=port)
            except (OSError, TimeoutError, SwarmError):
                continue
            varies = one != other
            if varies != self._reachable.mapping_varies:
                self._tell(replace(self._reachable, mapping_varies=varies))
            break
        self.knows_mapping.set()

    def _with_endpoints(self) -> Reachable:
        found = tuple(dict.fromkeys((*self._mapped, *self._own)))
        return replace(self._reachable, endpoints=found[:MAX_ENDPOINTS])

    def _tell(self, reachable: Reachable) -> None:
        self._reachable = reachable
        if self.joined.is_set():  # or it is said first, when the coordinator is there
            self._outbox.put_nowait(reachable)

    # ---- meetings

    async def _meet(self, meet: Meet) -> None:
        if len(self._meetings) >= MAX_MEETINGS or meet.meeting in self._meetings:
            return
        if sum(other.name == meet.name for other in self._meetings.values()) >= MAX_MEETINGS_WITH:
            logger.debug("%s asks for more than %d meetings", meet.name, MAX_MEETINGS_WITH)
            return
        meet = self._checked(meet)
        hopeless = self._known_hopeless(meet)
        shell = _Shell(self._clock, self._outbox.put_nowait, self._unreached, self._punches)
        meeting = _Meeting(meet, shell, hopeless)
        theirs = proof(meet.meeting, is_caller=not meet.is_caller)
        self._meetings[meet.meeting] = self._by_proof[theirs] = meeting
        self._start(self._attend(meet, meeting, theirs))
        async with self._met:
            self._met.notify_all()

    def _checked(self, meet: Meet) -> Meet:
        """The meeting without endpoints that this member's own place rules out."""
        seen = filter(self._vantage.may_dial, meet.endpoints)
        in_house = filter(self._vantage.is_in_house, meet.house_endpoints)
        return replace(meet, endpoints=tuple(seen), house_endpoints=tuple(in_house))

    async def _attend(self, meet: Meet, meeting: _Meeting, theirs: bytes) -> None:
        try:
            link = await meeting.run()
        except SwarmError as error:
            if meet.is_caller:
                self._answer(meet.name, error)
            return
        finally:
            del self._meetings[meet.meeting], self._by_proof[theirs]
        self._remember(meet, link.way)
        if not meet.is_caller:
            await self._serve(link, meet.name)
        elif not self._answer(meet.name, link):
            link.sock.close()

    async def _serve(self, link: Link, name: str) -> None:
        """Have gRPC answer, once the caller speaks; it may keep the stream for later."""
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
        self._relayed[name] += link.way is Way.RELAYED
        try:
            await self._front.serve(sock, sock.getpeername()[:2], first)
        except OSError:
            pass  # gRPC is being stopped, or the other side is gone
        finally:
            self._relayed[name] -= link.way is Way.RELAYED

    def _known_hopeless(self, meet: Meet) -> frozenset[Way]:
        ways, since_s = self._hopeless.get(meet.name, (frozenset(), 0.0))
        return ways if self._clock.now_s() - since_s < HOPELESS_S else frozenset()

    def _remember(self, meet: Meet, way: Way) -> None:
        if way is not Way.RELAYED:
            self._hopeless.pop(meet.name, None)
        elif meet.may_punch and not self._known_hopeless(meet):
            self._hopeless[meet.name] = frozenset({Way.PUNCHED}), self._clock.now_s()

    def _answer(self, name: str, answer: Link | SwarmError) -> bool:
        """Give it to whoever waits for this member; whether anybody does."""
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

    async def _visited(self, sock: socket.socket, remote: Address) -> None:
        """Somebody dialled the front, for a meeting."""
        async with asyncio.timeout(GREETING_S):
            shown = await receive_exactly(sock, PROOF_BYTES)
        async with asyncio.timeout(EARLY_S), self._met:
            await self._met.wait_for(lambda: shown in self._by_proof)
        self._front.keep(sock, remote)
        await self._by_proof[shown].visited(sock)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@dataclass(frozen=True, slots=True)
class _Shell:
    """The state that all meetings of a member share.

    Attributes:
        clock: the time.
        say: sends a message to the coordinator.
        unreached: notes a relay that has no place for a leg.
        punches: bounds loops of `_Meeting.punch`.
    """

    clock: Clock
    say: Callable[[FromMember], None]
    unreached: Callable[[str], None]
    punches: asyncio.Semaphore


class _Meeting:
    """The sockets of one meeting, as its ladder says."""

    def __init__(self, meet: Meet, shell: _Shell, hopeless: frozenset[Way]) -> None:
        self._meet = meet
        self._clock = shell.clock
        self._say = shell.say
        self._unreached = shell.unreached
        self._punches = shell.punches
        self._began_s = self._clock.now_s()
        self._ladder = Ladder(meet, self._began_s, hopeless)
        self.name = meet.name
        self._streams: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._leg_port, self._relay_host = 0, ""
        self._changed = asyncio.Event()
        self._taken: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def run(self) -> Link:
        """The stream that is taken.

        Raises:
            Unavailable: there is none.
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
            await self._say_taken(link)
        finally:
            await self._close()
        return link

    def told(self, punch: Punch) -> None:
        """The relay sees the other side's leg."""
        self._do(self._ladder.told(punch))

    async def visited(self, sock: socket.socket) -> None:
        """The other side dialled this one's front, and proved who it is."""
        mine = MAGIC + PAIR + proof(self._meet.meeting, is_caller=self._meet.is_caller)
        await asyncio.get_running_loop().sock_sendall(sock, mine)
        self._opened(sock, Way.REVERSE if self._meet.is_caller else Way.DIRECT)

    async def _say_taken(self, link: Link) -> None:
        if not self._meet.is_caller:
            return
        took_s = self._clock.now_s() - self._began_s
        try:
            await asyncio.get_running_loop().sock_sendall(link.sock, CHOSEN)
        except OSError as error:
            link.sock.close()
            raise Unavailable(f"the stream to {self._meet.name} broke: {error}") from None
        self._say(Linked(meeting=self._meet.meeting, way=link.way, took_s=took_s))
        tell = logger.debug if link.way is Way.DIRECT else logger.info
        tell("reaches %s %s, after %.0f ms", self._meet.name, link.way, took_s * 1000)

    async def _close(self) -> None:
        """All but the stream that was taken."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        taken = self._taken if self._taken.done() and not self._taken.cancelled() else None
        kept = taken.result().sock if taken and taken.exception() is None else None
        for sock in self._streams:
            if sock is not kept:
                sock.close()

    # ---- what the ladder says

    def _do(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Dial(endpoint, way):
                    self._start(self._dial(endpoint, way))
                case LeaveLeg(relay, ticket):
                    self._start(self._leave_leg(relay, ticket))
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

    async def _leave_leg(self, relay: str, ticket: bytes) -> None:
        is_seen, began_s = False, self._clock.now_s()
        try:
            sock = await dial(relay)
            self._streams.append(sock)
            await self._show(ticket, sock)
            is_seen = True
            # Two trips: one to connect, one to be answered.
            self._do(self._ladder.seen((self._clock.now_s() - began_s) / 2))
            await receive_exactly(sock, 1)
        except (OSError, TimeoutError, SwarmError):
            if not is_seen:
                self._unreached(relay)
            self._ladder.lost_leg()
            self._changed.set()
            raise
        self._opened(sock, Way.RELAYED)

    async def _show(self, ticket: bytes, sock: socket.socket) -> None:
        """Show a relay the ticket; it has reported the leg to the coordinator by its answer."""
        self._leg_port = sock.getsockname()[1]
        self._relay_host = host_of(endpoint_of(sock.getpeername()[:2]))
        shown = MAGIC + LEG + bytes([len(ticket)]) + ticket
        async with asyncio.timeout(GREETING_S):
            await asyncio.get_running_loop().sock_sendall(sock, shown)
            await receive_address(sock)

    async def _punch(self, address: str) -> None:
        """Simultaneous open, from the leg's port: again and again, for a router may say no."""
        # A relay at a public address sees no private ones, so the message is wrong.
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
        self._do(self._ladder.opened(number, way, self._clock.now_s()))
        if not self._meet.is_caller:
            self._start(self._await_choice(number, way))

    async def _await_choice(self, number: int, way: Way) -> None:
        if await receive_exactly(self._streams[number], 1) == CHOSEN:
            self._do(self._ladder.chosen(number, way))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(_quietly, self._tasks))


def _quietly(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    """A way that does not work is no news: others may."""
    tasks.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, OSError | TimeoutError | SwarmError):
        logger.error("a way failed", exc_info=error)
