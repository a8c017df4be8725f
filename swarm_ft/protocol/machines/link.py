"""An end of the link between two peers as a state machine: the connected channels.

The machine receives messages and returns effects; it knows no stream, no clock, and not what
channels carry. Both ends run the same machine. A link lives as long as the peers know each other:
attempts begin and end over one stream, and streams break and come back under an attempt. Rules:

- each side greets once for each attempt and stream: when it opens a channel, and for each open
  channel when a stream comes up;
- a channel is connected while both sides' last greetings on this stream are for the same attempt
  of the same run;
- a greeting for any other attempt is stored, the newest of each kind: one side may learn of an
  attempt sooner;
- any other message over a channel that is not connected is void.

A stream keeps the order of its messages. So a message between two greetings belongs to the attempt
of the first one.
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
    """Effect: send this channel's present hello."""

    kind: ChannelKind


@dataclass(frozen=True, slots=True)
class Connected:
    """Effect: both sides are connected; check the other side's hello."""

    kind: ChannelKind
    hello: ChannelHello


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Effect: the other side is gone, or has another attempt."""

    kind: ChannelKind


@dataclass(frozen=True, slots=True)
class Deliver:
    """Effect: a message of the attempt that this channel is open for."""

    kind: ChannelKind
    message: ChannelMessage


LinkEffect = Greet | Connected | Disconnected | Deliver
Effects = list[LinkEffect]


class LinkMachine:
    """Link to one peer; see the module's docstring."""

    def __init__(self) -> None:
        self._is_up = False
        self._ours: dict[ChannelKind, _Of] = {}
        self._theirs: dict[ChannelKind, ChannelHello] = {}

    def is_connected(self, kind: ChannelKind) -> bool:
        """Whether the other side accepts messages of this channel."""
        theirs = self._theirs.get(kind)
        return theirs is not None and _of(theirs) == self._ours.get(kind)

    # ---- actions of this side

    def open(self, hello: ChannelHello) -> Effects:
        """Open a channel for an attempt; the channel of its kind closes."""
        kind = kind_of(hello)
        self._ours[kind] = _of(hello)
        if not self._is_up:
            return []
        effects: Effects = [Greet(kind)]
        if self.is_connected(kind):
            effects.append(Connected(kind, self._theirs[kind]))
        return effects

    def close(self, kind: ChannelKind) -> Effects:
        """Close a channel; the other side learns it from the next attempt's greeting."""
        was_connected = self.is_connected(kind)
        self._ours.pop(kind, None)
        return [Disconnected(kind)] if was_connected else []

    # ---- events of the stream

    def up(self) -> Effects:
        """Record that a stream stands, after the exchange of link hellos."""
        self._is_up = True
        return [Greet(kind) for kind in self._ours]

    def down(self) -> Effects:
        """Record that the stream is gone, with the other side's greetings."""
        effects: Effects = [Disconnected(kind) for kind in self._ours if self.is_connected(kind)]
        self._is_up = False
        self._theirs.clear()
        return effects

    def receive(self, message: LinkHello | ChannelMessage) -> Effects:
        """Process a message of the other side.

        Raises:
            OutOfTurn: A hello arrived twice; the stream should be dropped.
        """
        match message:
            case LinkHello():
                raise OutOfTurn(f"{message.peer_id} sent its hello twice")
            case BoundaryHello() | ReduceHello():
                return self._greeted(message)
            case _:
                kind = kind_of(message)
                return [Deliver(kind, message)] if self.is_connected(kind) else []

    def _greeted(self, hello: ChannelHello) -> Effects:
        kind, was_connected = kind_of(hello), self.is_connected(kind_of(hello))
        if was_connected and _of(hello) == self._ours[kind]:
            raise OutOfTurn(f"{hello.peer_id} sent its hello twice in attempt {hello.attempt}")
        self._theirs[kind] = _slim(hello)
        if self.is_connected(kind):
            return [Connected(kind, hello)]
        return [Disconnected(kind)] if was_connected else []


def _of(hello: ChannelHello) -> _Of:
    return hello.run_id, hello.attempt


def _slim(hello: ChannelHello) -> ChannelHello:
    # A side that has not begun an attempt has received nothing in it. So a stored hello is small,
    # whatever it claims.
    return replace(hello, received=frozenset()) if isinstance(hello, BoundaryHello) else hello
