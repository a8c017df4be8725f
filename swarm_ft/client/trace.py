"""Trace files: peers' timelines as a JSON array, written as they arrive, one event a line.

If this process is killed, the closing bracket is missing; viewers read such a file all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from hashlib import blake2b
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swarm_ft.codec.spec import Direction
from swarm_ft.errors import BadOption
from swarm_ft.ids import Attempt, PeerId
from swarm_ft.protocol.messages.timeline import PeerTimeline, Span, SpanKind, StepTimeline
from swarm_ft.protocol.spec.layers import LayerRange

# ---- peers' timelines as events of the Chrome trace format, all on the coordinator's clock
#
# The format: Nestle, "Trace Event Format" (Google, 2016), as ui.perfetto.dev and chrome://tracing
# read it. A peer is a process there, and a lane a thread, whose slices must not overlap.

Event = dict[str, Any]
"""One event, ready for JSON."""

_NAMES = {
    SpanKind.FORWARD: ("compute", "forward"),
    SpanKind.BACKWARD: ("compute", "backward"),
    SpanKind.FORWARD_BACKWARD: ("compute", "forward + loss + backward"),
    SpanKind.WEIGHTS: ("compute", "weights"),
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
"""Lane and slice name of each kind of span."""
_MOMENTS = {SpanKind.PLAN, SpanKind.READY, SpanKind.COMMIT}
_ORDER = ("step", "compute", "wait", "receive", "decode", "encode", "send", "reduce")
"""Lanes from top to bottom; lanes of frames exist once for each direction."""
_FLOW = {SpanKind.ENCODE: "s", SpanKind.SEND: "t", SpanKind.RECEIVE: "t", SpanKind.DECODE: "f"}
"""Phases of a frame's path from peer to peer: start, step, end."""
MAX_ROWS = 64
"""Number of overlapping slices that a lane shows; further ones are dropped."""
_CATEGORY = "swarm"
_MAIN_THREAD = 1
"""Thread number of the first lane; thread 0 is reserved."""


class PeerTrace:
    """Trace events of one peer.

    Args:
        pid: Process number of the peer in the trace.
        peer_id: Name of the peer.
        layers: Blocks that the peer hosts.
    """

    def __init__(self, pid: int, peer_id: PeerId, layers: LayerRange) -> None:
        self._pid = pid
        self._title = f"layers {layers} ({peer_id})"
        self._rank = layers.start
        self._offset_us: int | None = None
        self._error_us = -1
        self._lanes: dict[str, Rows] = {}

    def begin(self) -> Iterator[Event]:
        """Yield the events that name and sort the process."""
        yield self._metadata("process_name", {"name": self._title})
        yield self._metadata("process_sort_index", {"sort_index": self._rank})

    def add(self, timeline: StepTimeline) -> Iterator[Event]:
        """Yield the events of a timeline; a peer's timelines must come in order."""
        offset_us, before_us = timeline.clock.offset_us, self._offset_us
        # A better estimate may move this timeline back, over the end of the one before.
        moved_us = max(0, before_us - offset_us) if before_us is not None else 0
        self._offset_us, zero_us = offset_us, timeline.origin_us + offset_us
        yield from self._clock_events(timeline, zero_us)
        for span in sorted(timeline.spans, key=lambda span: span.begin_us):
            if span.kind in _MOMENTS:
                yield self._moment(span, zero_us)
            else:
                yield from self._slice(span, zero_us, moved_us, timeline)

    def _clock_events(self, timeline: StepTimeline, zero_us: int) -> Iterator[Event]:
        counter: Event = {"ph": "C", "cat": _CATEGORY, "ts": zero_us}
        counter.update(pid=self._pid, tid=_MAIN_THREAD)
        error_us = timeline.clock.error_us
        yield {**counter, "name": "clock error", "args": {"us": error_us}}
        if timeline.num_dropped:
            yield {**counter, "name": "dropped", "args": {"spans": timeline.num_dropped}}
        if error_us > self._error_us:
            self._error_us = error_us
            labels = f"clock right to {error_us / 1000:.3f} ms"
            yield self._metadata("process_labels", {"labels": labels})

    def _moment(self, span: Span, zero_us: int) -> Event:
        event = self._event(span, zero_us + span.begin_us)
        return {**event, "ph": "i", "s": "t", "tid": _MAIN_THREAD}

    def _slice(
        self, span: Span, zero_us: int, moved_us: int, timeline: StepTimeline
    ) -> Iterator[Event]:
        lane, way = _NAMES[span.kind][0], span.direction
        title = f"{lane} {way.name.lower()}" if way else lane
        rows = self._lanes.setdefault(title, Rows())
        num_rows, begin_us = len(rows), zero_us + span.begin_us
        placed = rows.place(begin_us, begin_us + span.duration_us, moved_us)
        if placed is None:
            return
        row, begin_us, end_us = placed
        tid = _MAIN_THREAD + MAX_ROWS * ((1 + len(Direction)) * _ORDER.index(lane) + (way or 0))
        tid += row
        if row == num_rows:
            name = f"{title} {row + 1}" if row else title
            yield self._metadata("thread_name", {"name": name}, tid)
            yield self._metadata("thread_sort_index", {"sort_index": tid}, tid)
        event = self._event(span, begin_us)
        event.update(ph="X", dur=end_us - begin_us, tid=tid)
        if span.kind is SpanKind.STEP:
            event["args"].update(_of_step(timeline))
        yield event
        if span.kind in _FLOW:
            yield _flow(event, span, timeline.attempt)

    def _event(self, span: Span, ts: int) -> Event:
        name, args = _NAMES[span.kind][1], _arguments(span)
        return {"name": name, "cat": _CATEGORY, "ts": ts, "pid": self._pid, "args": args}

    def _metadata(self, name: str, args: Event, tid: int = _MAIN_THREAD) -> Event:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": tid, "args": args}


class Rows:
    """Rows of one lane; overlapping slices lie in different rows."""

    def __init__(self) -> None:
        self._ends_us: list[int] = []

    def __len__(self) -> int:
        return len(self._ends_us)

    def place(self, begin_us: int, end_us: int, slack_us: int) -> tuple[int, int, int] | None:
        """Return the first row with room, and the slice's begin and end there; None without room.

        Args:
            begin_us: Begin of the slice; slices of one timeline come in order.
            end_us: End of the slice.
            slack_us: Largest overlap with the slice before that is cut off instead.
        """
        for row, free_us in enumerate(self._ends_us):
            if free_us - slack_us <= begin_us:
                begin_us = max(begin_us, free_us)
                self._ends_us[row] = max(begin_us, end_us)
                return row, begin_us, self._ends_us[row]
        if len(self) == MAX_ROWS:
            return None
        self._ends_us.append(end_us)
        return len(self) - 1, begin_us, end_us


class TraceEvents:
    """Trace events of all peers; names of peers and lanes precede their first event."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, PeerTrace] = {}

    def add(self, timeline: PeerTimeline) -> Iterator[Event]:
        """Yield the events of one timeline."""
        peer = self._peers.get(timeline.peer_id)
        if peer is None:
            peer = PeerTrace(len(self._peers) + 1, timeline.peer_id, timeline.layers)
            self._peers[timeline.peer_id] = peer
            yield from peer.begin()
        yield from peer.add(timeline.timeline)


def _arguments(span: Span) -> Event:
    known: Event = {"step": span.step}
    if span.direction is not None:
        known["direction"] = span.direction.name.lower()
    for name in ("microbatch", "sample", "boundary"):
        if getattr(span, name) is not None:
            known[name] = getattr(span, name)
    if span.num_bytes:
        known["bytes"] = span.num_bytes
    return known


def _of_step(timeline: StepTimeline) -> Event:
    return {
        "attempt": timeline.attempt,
        "clock_offset_us": timeline.clock.offset_us,
        "clock_error_us": timeline.clock.error_us,
    }


def _flow(event: Event, span: Span, attempt: Attempt) -> Event:
    """Return one point of a frame's path, inside its slice."""
    key = (attempt, span.step, span.boundary, span.microbatch, span.sample, span.direction)
    digest = blake2b(repr(key).encode(), digest_size=6).digest()  # JSON's numbers have 53 bits
    flow: Event = {name: event[name] for name in ("cat", "pid", "tid")}
    flow.update(name="frame", id=int.from_bytes(digest, "little"), ph=_FLOW[span.kind])
    flow["ts"] = event["ts"] + event["dur"] // 2
    return {**flow, "bp": "e"} if flow["ph"] == "f" else flow


MAX_EVENTS = 4_000_000
"""Number of events in a file, about 700 MB; viewers hardly open more, so later events are dropped.
"""


class TraceFile:
    """Trace file, as a context manager.

    Args:
        path: Path of the file; an existing file is replaced.
        on_trouble: Callback for a message if the file ends early.
    """

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        self._path = path
        self._on_trouble = on_trouble
        self._events = TraceEvents()
        self._num_events = 0
        self._file: TextIOWrapper | None = None

    def __enter__(self) -> Self:
        """Open the file; raises BadOption if it cannot be written."""
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise BadOption(f"--trace {self._path}: cannot be written: {error.strerror}") from error
        self._write("[")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def add(self, timeline: PeerTimeline) -> None:
        """Write a peer's timeline; do nothing once the file or the disk is full."""
        if self._file is None:
            return
        lines = []
        for event in self._events.add(timeline):
            lines.append(",\n" if self._num_events else "\n")
            lines.append(json.dumps(event, separators=(",", ":")))
            self._num_events += 1
        self._write("".join(lines))
        if self._num_events >= MAX_EVENTS:
            self._on_trouble(f"--trace {self._path}: is full; trace fewer steps, with --steps")
            self._end()

    def _end(self) -> None:
        self._write("\n]\n")
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, text: str) -> None:
        """Write and flush, so that the text survives a kill of this process."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._on_trouble(f"--trace {self._path}: ends here: {error.strerror}")
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()


def open_trace(
    path: Path | None, on_trouble: Callable[[str], None]
) -> AbstractContextManager[TraceFile | None]:
    """Open a trace file for the context; None if there is no path."""
    return TraceFile(path, on_trouble) if path is not None else nullcontext()
