"""One end of the link between two peers as a state machine: which channels are connected.

It sees messages and says what to do; it knows no stream, no clock, and not what channels carry.
Both ends run the same machine. A link lives as long as the peers know each other: attempts begin
and end over a stream that stands, and streams break and come back under an attempt. Rules:

- each side greets once for each attempt and stream: when it opens a channel, and for each open
  channel when a stream comes up;
- a channel is connected while both sides greeted last, on this stream, for the same attempt of the
  same run;
- a greeting for any other attempt is kept, the newest of each kind: the other side heard of an
  attempt sooner, or is about to hear of one;
- whatever else comes over a channel that is not connected is void.

A stream keeps the order of its messages. So what a side hears after the greeting of an attempt,
and before the next one, belongs to that attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import Attempt, RunId
from swarm_ft.protocol.messages.boundary import BoundaryHello
from swarm_ft.protocol.messages.link import (
    ChannelHello,
    ChannelKind,
    ChannelMessage,
    LinkHello,
    kind_of,
)
from swarm_ft.protocol.messages.reduction import ReduceHello

_Of = tuple[RunId, Attempt]


@dataclass(frozen=True, slots=True)
class Greet:
    """Send this channel's hello, as of now."""

    kind: ChannelKind


@dataclass(frozen=True, slots=True)
class Connected:
    """Both sides are there, and this is what the other said; check it."""

    kind: ChannelKind
    hello: ChannelHello


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The other side is there no more, or not for this attempt."""

    kind: ChannelKind


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message of the attempt that this channel is open for."""

    kind: ChannelKind
    message: ChannelMessage


LinkEffect = Greet | Connected | Disconnected | Deliver
Effects = list[LinkEffect]


class LinkMachine:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._is_up = False
        self._ours: dict[ChannelKind, _Of] = {}
        self._theirs: dict[ChannelKind, ChannelHello] = {}

    def is_connected(self, kind: ChannelKind) -> bool:
        """Whether what this side says over the channel will be taken."""
        theirs = self._theirs.get(kind)
        return theirs is not None and _of(theirs) == self._ours.get(kind)

    # ---- what this side does

    def open(self, hello: ChannelHello) -> Effects:
        """An attempt begins here, which has this hello; the channel of its kind is closed."""
        kind = kind_of(hello)
        self._ours[kind] = _of(hello)
        if not self._is_up:
            return []
        effects: Effects = [Greet(kind)]
        if self.is_connected(kind):
            effects.append(Connected(kind, self._theirs[kind]))
        return effects

    def close(self, kind: ChannelKind) -> Effects:
        """The attempt is over here. The other side learns it by the next one's greeting."""
        was_connected = self.is_connected(kind)
        self._ours.pop(kind, None)
        return [Disconnected(kind)] if was_connected else []

    # ---- what the stream does

    def up(self) -> Effects:
        """A stream stands, and link hellos were exchanged."""
        self._is_up = True
        return [Greet(kind) for kind in self._ours]

    def down(self) -> Effects:
        """The stream is gone, and with it whatever the other side said."""
        effects: Effects = [Disconnected(kind) for kind in self._ours if self.is_connected(kind)]
        self._is_up = False
        self._theirs.clear()
        return effects

    def receive(self, message: LinkHello | ChannelMessage) -> Effects:
        """Something arrived from the other side.

        Raises:
            OutOfTurn: a hello that was said already; the stream should be dropped.
        """
        match message:
            case LinkHello():
                raise OutOfTurn(f"{message.peer_id} said hello twice")
            case BoundaryHello() | ReduceHello():
                return self._greeted(message)
            case _:
                kind = kind_of(message)
                return [Deliver(kind, message)] if self.is_connected(kind) else []

    def _greeted(self, hello: ChannelHello) -> Effects:
        kind, was_connected = kind_of(hello), self.is_connected(kind_of(hello))
        if was_connected and _of(hello) == self._ours[kind]:
            raise OutOfTurn(f"{hello.peer_id} said hello twice in attempt {hello.attempt}")
        self._theirs[kind] = _slim(hello)
        if self.is_connected(kind):
            return [Connected(kind, hello)]
        return [Disconnected(kind)] if was_connected else []


def _of(hello: ChannelHello) -> _Of:
    return hello.run_id, hello.attempt


def _slim(hello: ChannelHello) -> ChannelHello:
    # Who has yet to begin an attempt sent nothing in it that could have been received. So a hello
    # that is kept is small, whatever it claims.
    return replace(hello, received=frozenset()) if isinstance(hello, BoundaryHello) else hello
