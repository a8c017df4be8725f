"""Peers' timelines as events of the Chrome trace format, all on the coordinator's clock. No I/O.

The format: Nestle, "Trace Event Format" (Google, 2016), as ui.perfetto.dev and chrome://tracing
read it. A peer is a process there, and a lane a thread, whose slices must not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from swarm_ft.ids import PeerId
from swarm_ft.protocol.codec_spec import Direction
from swarm_ft.protocol.timeline import PeerTimeline, Span, SpanKind, StepTimeline

Event = dict[str, Any]
"""One event, ready for JSON."""

_NAMES = {
    SpanKind.FORWARD: ("compute", "forward"),
    SpanKind.BACKWARD: ("compute", "backward"),
    SpanKind.FORWARD_BACKWARD: ("compute", "forward + loss + backward"),
    SpanKind.GRADIENT: ("compute", "gradient"),
    SpanKind.OPTIMIZER: ("compute", "optimizer"),
    SpanKind.ENCODE: ("encode", "encode"),
    SpanKind.SEND: ("send", "send"),
    SpanKind.RECEIVE: ("receive", "receive"),
    SpanKind.DECODE: ("decode", "decode"),
    SpanKind.WAIT_INPUT: ("wait", "wait for input"),
    SpanKind.WAIT_GRADIENT: ("wait", "wait for gradient"),
    SpanKind.WAIT_ACKS: ("wait", "wait for acknowledgements"),
    SpanKind.WAIT_COMMIT: ("wait", "wait for commit"),
    SpanKind.REDUCE: ("reduce", "sum gradients"),
    SpanKind.TIE: ("reduce", "sum tied gradients"),
    SpanKind.STEP: ("step", "step"),
    SpanKind.PLAN: ("step", "plan"),
    SpanKind.READY: ("step", "ready"),
    SpanKind.COMMIT: ("step", "commit"),
}
"""The lane and the slice of each kind."""
_MOMENTS = {SpanKind.PLAN, SpanKind.READY, SpanKind.COMMIT}
_ORDER = ("step", "compute", "wait", "receive", "decode", "encode", "send", "reduce")
"""Lanes from top to bottom; those of frames are there for each direction."""
_FLOW = {SpanKind.ENCODE: "s", SpanKind.SEND: "t", SpanKind.RECEIVE: "t", SpanKind.DECODE: "f"}
"""A frame's way from peer to peer, as a flow that starts, goes on and ends."""
MAX_BESIDE = 64
"""Slices of one lane at one moment; each has a row of its own."""
_CATEGORY = "swarm"


class PeerTrace:
    """The events of one peer.

    Args:
        pid: its process in the trace.
        peer_id: its name.
        place: what it hosts, for people.
        rank: sorts processes.
    """

    def __init__(self, pid: int, peer_id: PeerId, place: str, rank: int) -> None:
        self._pid = pid
        self._title = f"{place} ({peer_id})"
        self._rank = rank
        self._offset_us: int | None = None
        self._error_us = 0
        self._row_ends_us: dict[str, list[int]] = {}

    def begin(self) -> Iterator[Event]:
        """What names the process."""
        yield self._metadata("process_name", {"name": self._title})
        yield self._metadata("process_sort_index", {"sort_index": self._rank})

    def add(self, timeline: StepTimeline) -> Iterator[Event]:
        """The events of a timeline; the peer's timelines come in order."""
        offset_us, before_us = timeline.clock.offset_us, self._offset_us
        # A better estimate may move this timeline back, over the end of the one before.
        moved_us = max(0, before_us - offset_us) if before_us is not None else 0
        self._offset_us, zero_us = offset_us, timeline.origin_us + offset_us
        yield from self._clock_events(timeline, zero_us)
        for span in sorted(timeline.spans, key=lambda span: (span.begin_us, -span.duration_us)):
            yield from self._slice(span, zero_us, moved_us, timeline)

    def _clock_events(self, timeline: StepTimeline, zero_us: int) -> Iterator[Event]:
        error_us, named = timeline.clock.error_us, {"pid": self._pid, "tid": 0, "cat": _CATEGORY}
        yield {"ph": "C", "name": "clock error", "ts": zero_us, "args": {"us": error_us}, **named}
        if timeline.num_dropped:
            dropped = {"spans": timeline.num_dropped}
            yield {"ph": "C", "name": "dropped", "ts": zero_us, "args": dropped, **named}
        if error_us > self._error_us:
            self._error_us = error_us
            labels = {"labels": f"clock right to {error_us / 1000:.3f} ms"}
            yield self._metadata("process_labels", labels)

    def _slice(
        self, span: Span, zero_us: int, moved_us: int, timeline: StepTimeline
    ) -> Iterator[Event]:
        lane, name = _NAMES[span.kind]
        direction = span.direction.name.lower() if span.direction else ""
        begin_us = zero_us + span.begin_us
        end_us = begin_us + span.duration_us
        event: Event = {"name": name, "cat": _CATEGORY, "pid": self._pid}
        event["args"] = _arguments(span, timeline)
        if span.kind in _MOMENTS:
            yield {**event, "ph": "i", "s": "t", "ts": begin_us, "tid": _thread(lane, "", 0)}
            return
        title = f"{lane} {direction}".strip()
        rows = self._row_ends_us.setdefault(title, [])
        row = next((i for i, end in enumerate(rows) if end - moved_us <= begin_us), len(rows))
        if row == MAX_BESIDE:
            return
        tid = _thread(lane, direction, row)
        if row == len(rows):
            rows.append(begin_us)
            yield from self._name_row(title, tid, row)
        begin_us = max(begin_us, rows[row])
        end_us = rows[row] = max(end_us, begin_us)
        event.update(tid=tid, ts=begin_us)
        yield {**event, "ph": "X", "dur": end_us - begin_us}
        if span.kind in _FLOW:
            yield _flow(event, span, timeline, (begin_us + end_us) // 2)

    def _name_row(self, title: str, tid: int, row: int) -> Iterator[Event]:
        name = f"{title} {row + 1}" if row else title
        yield {**self._metadata("thread_name", {"name": name}), "tid": tid}
        yield {**self._metadata("thread_sort_index", {"sort_index": tid}), "tid": tid}

    def _metadata(self, name: str, args: Event) -> Event:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": 0, "args": args}


class TraceEvents:
    """All peers' events; what names a peer or a lane comes before its first."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, PeerTrace] = {}

    def add(self, told: PeerTimeline) -> Iterator[Event]:
        """The events of one timeline."""
        peer = self._peers.get(told.peer_id)
        if peer is None:
            pid = len(self._peers) + 1
            layers = told.layers
            peer = PeerTrace(pid, told.peer_id, f"layers {layers}", layers.start)
            self._peers[told.peer_id] = peer
            yield from peer.begin()
        yield from peer.add(told.timeline)


def _thread(lane: str, direction: str, row: int) -> int:
    way = Direction[direction.upper()] if direction else 0
    return MAX_BESIDE * ((1 + len(Direction)) * _ORDER.index(lane) + way) + row + 1


def _arguments(span: Span, timeline: StepTimeline) -> Event:
    known: Event = {"step": span.step}
    if span.kind is SpanKind.STEP:
        known["attempt"] = timeline.attempt
        known["clock_offset_us"] = timeline.clock.offset_us
        known["clock_error_us"] = timeline.clock.error_us
    if span.direction is not None:
        known["direction"] = span.direction.name.lower()
    for name in ("microbatch", "sample", "boundary"):
        if getattr(span, name) is not None:
            known[name] = getattr(span, name)
    if span.num_bytes:
        known["bytes"] = span.num_bytes
    return known


def _flow(event: Event, span: Span, timeline: StepTimeline, ts: int) -> Event:
    """One point of a frame's way, bound to the slice around it."""
    key = (timeline.attempt, span.step, span.boundary, span.microbatch, span.sample, span.direction)
    digest = blake2b(repr(key).encode(), digest_size=6).digest()  # JSON's numbers have 53 bits
    flow = {name: event[name] for name in ("cat", "pid", "tid")}
    flow.update(name="frame", ph=_FLOW[span.kind], id=int.from_bytes(digest, "little"), ts=ts)
    return {**flow, "bp": "e"} if flow["ph"] == "f" else flow
