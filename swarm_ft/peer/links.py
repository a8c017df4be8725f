"""Links to other peers: one stream for all messages that two peers exchange in a run.

    Links         all links of this peer
    PeerLink      the link to one peer, for one run
    LinkChannel   the use of that link by one end: a boundary, or a member of an all-reduce
    ChannelEnd    such an end, as this module sees it

`protocol.machines.link` decides which channels are connected. This module moves messages between
the stream and the ends of the channels. `protocol.machines.link_meter` measures the link's speed
with marks, which are pings and their replies.

The peer whose id sorts first dials, as long as an attempt uses the link. Of several streams the
newest stays. A broken stream is reopened under the attempt, and an open stream serves the next
attempt at once. Two peers that share several runs have one link for each run, so that messages of
one run never delay those of another.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any, Protocol, TypeVar

from swarm_ft.base.clock import Clock
from swarm_ft.base.log import get_logger
from swarm_ft.errors import (
    OutOfTurn,
    ProtocolError,
    RunMismatch,
    SwarmError,
    Unavailable,
    VersionMismatch,
)
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.machines.all_reduce import WINDOW_PIECES
from swarm_ft.protocol.machines.link import (
    Connected,
    Deliver,
    Disconnected,
    Greet,
    LinkEffect,
    LinkMachine,
)
from swarm_ft.protocol.machines.link_meter import QUIET_S, LinkMeter
from swarm_ft.protocol.machines.session import WINDOW_FRAMES
from swarm_ft.protocol.messages.boundary import BoundaryHello, Frame, SideInfoPart
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.control import MAX_MEASURED_LINKS
from swarm_ft.protocol.messages.link import (
    ChannelHello,
    ChannelKind,
    ChannelMessage,
    LinkHello,
    LinkMark,
    LinkMessage,
    LinkPing,
    LinkPong,
    kind_of,
)
from swarm_ft.protocol.messages.reduction import GradientPiece, ReduceHello
from swarm_ft.transport.base import Channel, MessageStream, Transport, until_one_ends
from swarm_ft.transport.methods import LINK
from swarm_ft.transport.rules import check_name

logger = get_logger(__name__)

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
"""Seconds between calls of a peer that does not answer."""
MAX_BROKEN_STREAMS = 3
"""Protocol errors after which a peer fails the attempt."""
UNREACHABLE_AFTER_S = 30.0
"""Seconds after which an unreachable peer fails the attempt; the coordinator reports the reason."""
GREETING_S = 30.0
"""Seconds within which a connected peer has to send its hello."""
UNNAMED_S = 5.0
"""Seconds for which a stream stays open that no attempt uses, from a peer that was not assigned.

The peer may have received its assignment earlier than this one; it then waits on the stream, and
may call again. Streams of members that no assignment names are closed by this time.
"""
MAX_IDLE_LINKS = 64
"""Links to peers that no attempt here uses and that the present assignment does not name."""
MAX_ANSWERS = 2 * WINDOW_FRAMES + 8 * WINDOW_PIECES
"""Acknowledgements and other replies in the queue.

Two replies fit for each message that the other side may have on its way. More replies mean that the
other side sends, but does not read.
"""

Hello = TypeVar("Hello", bound=ChannelHello)
Message = TypeVar("Message", bound=ChannelMessage, contravariant=True)
LinkStream = MessageStream[LinkMessage, LinkMessage]
Send = Callable[[ChannelMessage], Awaitable[None]]


class Backoff:
    """Random waits between tries: each is about twice as long as the last, and callers spread out.

    A wait is drawn from the upper half of its range ("equal jitter": M. Brooker, Exponential
    Backoff And Jitter, 2015).
    """

    def __init__(self, rng: Random, *, min_s: float, max_s: float) -> None:
        self._rng = rng
        self._min_s, self._max_s = min_s, max_s
        self._next_s = min_s

    def reset(self) -> None:
        """Start again at the shortest wait, after a success."""
        self._next_s = self._min_s

    def draw_s(self) -> float:
        """Return the seconds to wait before the next try."""
        at_most_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return self._rng.uniform(at_most_s / 2, at_most_s)


class ChannelEnd(Protocol[Hello, Message]):
    """An end of a channel, connected to its counterpart at another peer for one attempt."""

    @property
    def hello(self) -> Hello:
        """Hello of this end, as of now."""
        ...

    def on_connected(self, hello: Hello) -> None:
        """Connect to the other end, which receives messages from now on.

        Raises:
            RunMismatch: The other end has another RunSpec.
            OutOfTurn: The hello is not of the expected counterpart.
        """
        ...

    def on_disconnected(self) -> None:
        """Disconnect: the other end is gone, or has left this attempt; messages may be lost."""
        ...

    def receive(self, message: Message) -> None:
        """Handle a message of the other end.

        Raises:
            SwarmError: The message is not allowed; the stream is dropped.
        """
        ...

    async def write(self, message: Message, send: Send) -> None:
        """Send a queued message of this end with `send`, now that its turn has come.

        The end counts its bytes here, since queued messages may be dropped.
        """
        ...


AnyChannelEnd = ChannelEnd[Any, Any]
"""A channel end of any kind of channel; the kind determines the types of its messages."""


class LinkChannel:
    """A channel from one end to its counterpart, over the link to that peer.

    Args:
        links: Links of this peer.
        peer_id: Peer of the counterpart.
        endpoint: Address of that peer, from the coordinator; empty if unknown.
    """

    def __init__(self, links: Links, peer_id: PeerId, endpoint: str) -> None:
        self._links = links
        self.peer_id = peer_id
        self._endpoint = endpoint
        self._link: PeerLink | None = None

    @property
    def is_relayed(self) -> bool:
        """Whether messages pass a relay at present."""
        return self._links.is_relayed(self.peer_id)

    async def keep_connected(self, end: AnyChannelEnd) -> None:
        """Keep `end` connected until cancelled.

        Raises:
            Unavailable: The peer has another RunSpec or protocol version, or was unreachable for
                UNREACHABLE_AFTER_S.
            ProtocolError: The peer broke the protocol too often.
        """
        self._link = self._links.link_to(self.peer_id, end.hello.run_id)
        try:
            await self._link.keep_connected(end, self._endpoint)
        finally:
            self._link = None

    def send(self, message: ChannelMessage) -> None:
        """Queue a message, acknowledgements first; it is lost if the channel is not connected."""
        if self._link is not None:
            self._link.send(message)

    def break_off(self, error: SwarmError) -> None:
        """End the present stream, if any, because of a message on it."""
        if self._link is not None:
            self._link.break_off(error)


class PeerLink:
    """The link to one peer for one run; see the module. Create it in a running event loop.

    Args:
        links: Links of this peer, which are notified when a stream or its use ends.
        peer_id: Id of the other peer.
        run_id: Run of the link.
    """

    def __init__(self, links: Links, peer_id: PeerId, run_id: RunId) -> None:
        self._links = links
        self._peer_id = peer_id
        self._run_id = run_id
        self._machine = LinkMachine()
        self._meter = LinkMeter()
        self._outgoing = _Outgoing()
        # The ends that use the link now, each with a future for an error that fails its attempt.
        self._ends: dict[ChannelKind, AnyChannelEnd] = {}
        self._failures: dict[ChannelKind, asyncio.Future[None]] = {}
        self._has_ends = asyncio.Event()
        self._has_no_ends = asyncio.Event()
        self._has_no_ends.set()
        # The streams of the link: one is served, and others wait for it to end.
        self._dial_lock = asyncio.Lock()
        self._serve_lock = asyncio.Lock()
        self._dialled: tuple[str, asyncio.Task[None]] | None = None  # endpoint, and its service
        self._newest_stream: LinkStream | None = None
        self._num_streams = 0
        self._num_broken_streams = 0
        self._stream_error: asyncio.Future[None] | None = None  # ends the served stream

    @property
    def is_idle(self) -> bool:
        """Whether no attempt here uses the link."""
        return not self._ends

    @property
    def is_up(self) -> bool:
        """Whether a stream is open, or opening."""
        return self._num_streams > 0

    @property
    def speed(self) -> LinkSpeed:
        """Measured speed of the link."""
        return self._meter.speed

    @property
    def is_quiet(self) -> asyncio.Event:
        """Event that is set while no frames or pieces wait or are being written."""
        return self._outgoing.is_quiet

    @property
    def _is_dialler(self) -> bool:
        return self._links.own < self._peer_id

    @property
    def _hello(self) -> LinkHello:
        return LinkHello(peer_id=self._links.own, to=self._peer_id, run_id=self._run_id)

    def _tidy(self) -> None:
        self._links.tidy(self._peer_id, self._run_id)

    # ---- channels

    async def keep_connected(self, end: AnyChannelEnd, endpoint: str) -> None:
        """Keep an end connected until cancelled; see `LinkChannel.keep_connected`."""
        kind = kind_of(end.hello)
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends[kind], self._failures[kind] = end, failure
        self._has_no_ends.clear()
        self._has_ends.set()
        self._num_broken_streams = 0
        try:
            self._apply(self._machine.open(end.hello))
            dialling = [self._dial(endpoint)] if self._is_dialler else []
            await until_one_ends(failure, *dialling)
        except SwarmError as error:
            error.about = self._peer_id
            raise
        finally:
            self._close(kind)
            self._tidy()

    def _close(self, kind: ChannelKind) -> None:
        self._apply(self._machine.close(kind))
        self._outgoing.forget(kind)
        del self._ends[kind], self._failures[kind]
        if not self._ends:
            self._has_ends.clear()
            self._has_no_ends.set()

    def send(self, message: ChannelMessage) -> None:
        """Queue a message; see `LinkChannel.send`."""
        if not self._machine.is_connected(kind_of(message)):
            return  # nothing is lost: both ends compare their states when they connect again
        self._outgoing.put(message)
        if self._outgoing.num_answers > MAX_ANSWERS:
            self.break_off(OutOfTurn("the peer sends messages, but does not read the replies"))

    def break_off(self, error: SwarmError) -> None:
        """End the present stream, if any."""
        if self._stream_error is not None and not self._stream_error.done():
            self._stream_error.set_exception(error)

    def _apply(self, effects: list[LinkEffect]) -> None:
        for effect in effects:
            end = self._ends[effect.kind]
            match effect:
                case Greet():
                    self._outgoing.put(end.hello)
                case Connected(_, hello):
                    self._connect(end, hello)
                case Disconnected():
                    self._outgoing.forget(effect.kind, but_hello=True)
                    end.on_disconnected()
                case Deliver(_, message):
                    end.receive(message)

    def _connect(self, end: AnyChannelEnd, hello: ChannelHello) -> None:
        # Errors are not raised here: a new attempt must not fail for messages of an earlier one.
        try:
            if hello.peer_id != self._peer_id:
                raise OutOfTurn(f"expected a hello of {self._peer_id}, got one of {hello.peer_id}")
            end.on_connected(hello)
        except SwarmError as error:
            self.break_off(error)

    # ---- dialling

    async def _dial(self, endpoint: str) -> None:
        """Keep a stream open until cancelled: dial, wait for its end, and dial again.

        A stream from an earlier call is kept if it leads to the same endpoint.
        """
        async with self._dial_lock:
            if self._dialled is not None and self._dialled[0] != endpoint:
                self.break_off(Unavailable(f"peer {self._peer_id} is at {endpoint} now"))
            backoff = Backoff(self._links.rng, min_s=MIN_BACKOFF_S, max_s=MAX_BACKOFF_S)
            failing_since_s: float | None = None
            while True:
                if self._dialled is not None:
                    await self.wait_ended()
                    self._dialled = None
                    await asyncio.sleep(backoff.draw_s())
                try:
                    await self._dial_once(endpoint)
                    failing_since_s = None
                    backoff.reset()
                except SwarmError as error:  # any error of the other peer may pass
                    logger.debug("peer %s: %s", self._peer_id, error.message)
                    failing_since_s = self._now_s() if failing_since_s is None else failing_since_s
                    self._check_may_retry(error, failing_since_s)
                    await asyncio.sleep(backoff.draw_s())

    async def _dial_once(self, endpoint: str) -> None:
        if not endpoint:
            raise Unavailable("the coordinator sent no address for it")
        channel = self._links.transport.connect(endpoint, self._peer_id)
        try:
            stream: LinkStream = channel.open(LINK)
            await stream.send(self._hello)
            theirs = await receive_hello(stream)
            if theirs != replace(self._hello, peer_id=self._peer_id, to=self._links.own):
                raise OutOfTurn(f"expected it at {endpoint}, got peer {theirs.peer_id}")
        except BaseException:
            await channel.close()
            raise
        logger.debug("peer %s: linked", self._peer_id)
        self._num_streams += 1
        self._dialled = endpoint, asyncio.create_task(self._serve_dialled(channel, stream))

    def _check_may_retry(self, error: SwarmError, failing_since_s: float) -> None:
        """Give up on a peer that cannot take part, or was unreachable for too long.

        Raises:
            Unavailable: Dialling again is useless.
        """
        if isinstance(error, RunMismatch | VersionMismatch):
            # This peer's spec was checked against the coordinator's, so the other peer is at fault.
            raise Unavailable(f"peer {self._peer_id}: {error.message}") from error
        if self._now_s() - failing_since_s >= UNREACHABLE_AFTER_S:
            raise Unavailable(f"peer {self._peer_id} cannot be reached: {error.message}") from error

    async def _serve_dialled(self, channel: Channel, stream: LinkStream) -> None:
        try:
            await self._serve(stream)
        except SwarmError as error:
            logger.debug("peer %s: %s", self._peer_id, error.message)
        except Exception as error:
            logger.exception("peer %s: a bug ended the stream", self._peer_id)
            self._fail(error)
        finally:
            self._num_streams -= 1
            await channel.close()
            self._tidy()

    # ---- streams

    async def answer(self, stream: LinkStream) -> None:
        """Serve a stream that the other side opened, until it ends; end an older one.

        Raises:
            SwarmError: The reason for the end.
        """
        self._num_streams += 1
        try:
            await stream.send(self._hello)
            await self._serve(stream)
        finally:
            self._num_streams -= 1
            self._tidy()

    async def _serve(self, stream: LinkStream) -> None:
        """Serve a stream in place of an older one, until it ends.

        Raises:
            Unavailable: A newer stream replaced this one, even before its turn.
            SwarmError: Another reason for the end.
        """
        self._newest_stream = stream
        self.break_off(Unavailable("a newer stream replaced it"))  # ends the one with the lock
        async with self._serve_lock:
            if self._newest_stream is not stream:  # since it waited for the lock
                raise Unavailable("a newer stream replaced it")
            try:
                await self._work(stream)
            except Unavailable:
                raise
            except SwarmError as error:
                self._count_broken(error)
                raise

    async def wait_ended(self) -> None:
        """Wait for the end of the stream that this side dialled."""
        if self._dialled is not None:
            await asyncio.wait({self._dialled[1]})

    async def _work(self, stream: LinkStream) -> None:
        self._links.check_open()  # `close` may have been called since the hello
        self._stream_error = asyncio.get_running_loop().create_future()
        self._outgoing.clear()
        try:
            self._meter.reset(self._now_s())
            self._apply(self._machine.up())
            parts = (
                self._write(stream),
                self._read(stream),
                self._close_unused(),
                self._probe_quiet(),
            )
            await until_one_ends(*parts, self._stream_error)
        finally:
            self._stream_error = None
            self._apply(self._machine.down())

    async def _write(self, stream: LinkStream) -> None:
        while True:
            if self._outgoing.is_empty:
                self._queue_mark(self._meter.on_idle(self._now_s()))
            await self._outgoing.filled()
            if self._outgoing.has_bulk:
                self._queue_mark(self._meter.on_busy(self._now_s()))
            await self._write_one(self._outgoing.pop(), stream)
            self._outgoing.written()

    async def _write_one(self, message: ChannelMessage | LinkMark, stream: LinkStream) -> None:
        if isinstance(message, LinkMark | BoundaryHello | ReduceHello):
            await stream.send(message)
            return
        if isinstance(message, Frame | GradientPiece):
            self._meter.on_written(len(message.tensor.payload))
        if isinstance(message, SideInfoPart):
            self._meter.on_written(len(message.data))
        await self._ends[kind_of(message)].write(message, stream.send)

    async def _read(self, stream: LinkStream) -> None:
        await self._wait_expected()
        while (message := await stream.receive()) is not None:
            match message:
                case LinkPing():
                    self._pinged(message)
                case LinkPong():
                    self._queue_mark(self._meter.on_pong(message, self._now_s()))
                case _:
                    self._apply(self._machine.receive(message))
            await self._wait_expected()

    def _pinged(self, ping: LinkPing) -> None:
        if self._outgoing.has_pong:
            raise OutOfTurn("the peer pinged again before the reply to its last ping")
        self._outgoing.put_mark(self._meter.on_ping(ping, self._now_s()))

    def _queue_mark(self, ping: LinkPing | None) -> None:
        """Queue a ping, if the meter wants one now."""
        if ping is not None:
            self._outgoing.put_mark(ping)

    async def _probe_quiet(self) -> None:
        """Let the meter probe while no messages are exchanged."""
        while True:
            await asyncio.sleep(QUIET_S)
            self._queue_mark(self._meter.tick(self._now_s()))

    def _now_s(self) -> float:
        return self._links.clock.now_s()

    async def _wait_expected(self) -> None:
        """Wait until this run expects messages of the peer; one may be as large as a frame."""
        if not self._links.is_assigned(self._peer_id, self._run_id):
            await self._has_ends.wait()

    async def _close_unused(self) -> None:
        """End the stream, by an error, if no attempt uses it for `UNNAMED_S`; see there."""
        while True:
            await self._has_no_ends.wait()
            try:
                async with asyncio.timeout(UNNAMED_S):
                    await self._has_ends.wait()
            except TimeoutError:
                self._links.check_named(self._peer_id, self._run_id)

    # ---- failures

    def _count_broken(self, error: SwarmError) -> None:
        """Count a stream on which the other side broke the protocol; too many fail the attempt."""
        if isinstance(error, RunMismatch) and self._is_dialler:
            # As in `_check_may_retry`: another stream would end the same way.
            self._fail(Unavailable(f"peer {self._peer_id}: {error.message}"))
            return
        logger.warning("peer %s: %s", self._peer_id, error.message)
        self._num_broken_streams += 1
        if self._num_broken_streams >= MAX_BROKEN_STREAMS:
            # The message is composed here: an error that the other side sent must not pass for one
            # of ours.
            text = f"{self._num_broken_streams} streams failed, the last with "
            self._fail(ProtocolError(f"peer {self._peer_id}: {text}{error.code}: {error.message}"))

    def _fail(self, error: Exception) -> None:
        for failure in self._failures.values():
            if not failure.done():
                failure.set_exception(error)


class _Outgoing:
    """Queues of a link: marks, then hellos and replies, then bulk messages, each in order.

    A hello precedes the messages that depend on it, which queue behind it or among the bulk
    messages. The windows of the senders bound the bulk messages; there are at most one ping and one
    pong.

    Bulk messages are frames, pieces of gradients and side information.

    Attributes:
        is_quiet: Event that is set while no bulk message waits or is being written.
    """

    def __init__(self) -> None:
        self.is_quiet = asyncio.Event()
        self.is_quiet.set()
        self._marks: deque[LinkMark] = deque()
        self._answers: deque[ChannelMessage] = deque()  # hellos and replies
        self._bulk: deque[ChannelMessage] = deque()
        self._changed = asyncio.Event()

    @property
    def num_answers(self) -> int:
        """Number of replies in the queue."""
        return len(self._answers)

    @property
    def has_pong(self) -> bool:
        """Whether a pong waits."""
        return any(isinstance(mark, LinkPong) for mark in self._marks)

    @property
    def has_bulk(self) -> bool:
        """Whether a bulk message waits."""
        return bool(self._bulk)

    @property
    def is_empty(self) -> bool:
        """Whether no message waits."""
        return not (self._marks or self._answers or self._bulk)

    def put_mark(self, mark: LinkMark) -> None:
        """Queue a mark before all other messages."""
        self._marks.append(mark)
        self._changed.set()

    def put(self, message: ChannelMessage) -> None:
        """Queue a message."""
        if isinstance(message, Frame | GradientPiece | SideInfoPart):
            self._bulk.append(message)
            self.is_quiet.clear()
        else:
            self._answers.append(message)
        self._changed.set()

    async def filled(self) -> None:
        """Wait for a message."""
        while self.is_empty:
            self._changed.clear()
            await self._changed.wait()

    def pop(self) -> ChannelMessage | LinkMark:
        """Remove and return the next message; the queue is not empty."""
        if self._marks:
            return self._marks.popleft()
        return (self._answers or self._bulk).popleft()

    def written(self) -> None:
        """Register that the popped message was sent or dropped."""
        if not self._bulk:
            self.is_quiet.set()

    def forget(self, kind: ChannelKind, *, but_hello: bool = False) -> None:
        """Drop all messages of a channel."""
        self._answers = deque(
            message
            for message in self._answers
            if kind_of(message) is not kind
            or (but_hello and isinstance(message, BoundaryHello | ReduceHello))
        )
        self._bulk = deque(message for message in self._bulk if kind_of(message) is not kind)
        self.written()

    def clear(self) -> None:
        """Drop all messages."""
        self._marks.clear()
        self._answers.clear()
        self._bulk.clear()
        self.written()


class Links:
    """The links of a peer, by other peer and run. They outlive attempts.

    Args:
        own: Id of this peer.
        transport: Transport of the streams.
        clock: Clock that measures how long a peer is unreachable.
        rng: Source of the waits between calls, so that peers do not call at the same time.
        is_relayed: Returns whether the stream to a peer passes a relay.
    """

    def __init__(
        self,
        own: PeerId,
        *,
        transport: Transport,
        clock: Clock,
        rng: Random,
        is_relayed: Callable[[PeerId], bool] = lambda _: False,
    ) -> None:
        self.own = own
        self.is_relayed = is_relayed
        self.transport = transport
        self.clock = clock
        self.rng = rng
        self._links: dict[tuple[PeerId, RunId], PeerLink] = {}
        self._named: dict[RunId, frozenset[PeerId]] = {}
        self._is_closed = False

    def set_assigned_peers(self, run_id: RunId, peers: Iterable[PeerId]) -> None:
        """Set the peers that the coordinator's present assignment of a run names."""
        self._named[run_id] = frozenset(peers)
        self._named = {run: names for run, names in self._named.items() if names}

    @property
    def speeds(self) -> dict[PeerId, LinkSpeed]:
        """Measured speeds by peer: the slowest first, those without a rate last.

        A link that was never saturated has round trips, but no rate. A peer with several links
        counts with the fastest.
        """
        known = [(peer, link.speed) for (peer, _), link in self._links.items()]
        known.sort(key=lambda one: one[1].bytes_per_s)
        fastest = {peer: speed for peer, speed in known if speed != LinkSpeed()}  # the last counts
        slowest_first = sorted(fastest.items(), key=lambda one: one[1].bytes_per_s or math.inf)
        return dict(slowest_first[:MAX_MEASURED_LINKS])

    async def wait_quiet(self) -> None:
        """Wait until no frames or pieces wait on any link."""
        while busy := [link for link in self._links.values() if not link.is_quiet.is_set()]:
            await busy[0].is_quiet.wait()

    def is_assigned(self, peer_id: PeerId, run_id: RunId) -> bool:
        """Whether the present assignment of a run names a peer."""
        return peer_id in self._named.get(run_id, ())

    def channel(self, peer_id: PeerId, endpoint: str) -> LinkChannel:
        """Return a channel to a peer, for one end of an attempt."""
        return LinkChannel(self, peer_id, endpoint)

    def link_to(self, peer_id: PeerId, run_id: RunId) -> PeerLink:
        """Return the link to a peer for a run, created if necessary."""
        if (peer_id, run_id) not in self._links:
            self._links[peer_id, run_id] = PeerLink(self, peer_id, run_id)
        return self._links[peer_id, run_id]

    async def answer(self, stream: LinkStream) -> None:
        """Serve a call of another peer, for `Transport.serve`.

        The caller may have received its assignment earlier than this peer, and waits then.

        Raises:
            OutOfTurn: The first message is no hello, is for another peer, or its sender may not
                dial.
            Unavailable: This peer is leaving, or has too many callers.
            SwarmError: The reason why the stream ended.
        """
        hello = await receive_hello(stream)
        if hello.to != self.own:
            raise OutOfTurn(f"expected a hello to peer {self.own}, got one to {hello.to}")
        if not hello.peer_id < self.own:
            raise OutOfTurn(f"peer {self.own} dials peer {hello.peer_id}, not the reverse")
        self.check_open()
        self._check_room(hello.peer_id, hello.run_id)
        await self.link_to(hello.peer_id, hello.run_id).answer(stream)

    def check_open(self) -> None:
        """Refuse new streams once this peer leaves.

        Raises:
            Unavailable: This peer leaves.
        """
        if self._is_closed:
            raise Unavailable(f"peer {self.own} leaves")

    def check_named(self, peer_id: PeerId, run_id: RunId) -> None:
        """Refuse to wait longer for a peer that no attempt here uses.

        Raises:
            Unavailable: The present assignment does not name the peer.
        """
        if not self.is_assigned(peer_id, run_id):
            raise Unavailable(f"no assignment of peer {self.own} names peer {peer_id}")

    async def close(self) -> None:
        """End all streams, and refuse new ones."""
        self._is_closed = True
        links = tuple(self._links.values())
        for link in links:
            link.break_off(Unavailable("this peer leaves"))
        for link in links:
            await link.wait_ended()

    def tidy(self, peer_id: PeerId, run_id: RunId) -> None:
        """Remove an unused link without a stream."""
        link = self._links.get((peer_id, run_id))
        if link is not None and link.is_idle and not link.is_up:
            del self._links[peer_id, run_id]

    def _check_room(self, peer_id: PeerId, run_id: RunId) -> None:
        """Refuse a peer that no assignment names while too many such links are idle.

        Raises:
            Unavailable: There are too many.
        """
        is_known = self.is_assigned(peer_id, run_id) or (peer_id, run_id) in self._links
        num_idle = sum(
            link.is_idle for which, link in self._links.items() if not self.is_assigned(*which)
        )
        if not is_known and num_idle >= MAX_IDLE_LINKS:
            raise Unavailable(f"peer {self.own} has {num_idle} unknown callers; try again later")


async def receive_hello(stream: LinkStream) -> LinkHello:
    """Receive the other side's first message.

    Raises:
        OutOfTurn: The message is no hello.
        NotAllowed: The caller's certificate is of another peer.
        Unavailable: No message came for GREETING_S.
    """
    try:
        async with asyncio.timeout(GREETING_S):
            hello = await stream.receive()
    except TimeoutError:
        raise Unavailable(f"{stream.remote} sent no hello within {GREETING_S:g} s") from None
    if not isinstance(hello, LinkHello):
        raise OutOfTurn(f"{stream.remote}: expected a hello as the first message")
    check_name(stream.caller, hello.peer_id)
    return hello
