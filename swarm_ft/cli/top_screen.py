"""The screen of `swarm-ft top`: the runs, the pipeline of one run, and the last events.

The data and the texts are those of `swarm-ft status`, `losses` and `events`. Names come from other
machines, so the screen consists of `Text`, never of markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from swarm_ft.cli.overview import short_names
from swarm_ft.cli.status_text import NO_PEERS, event_words, progress_words, waiting_words
from swarm_ft.client.formatting import printable
from swarm_ft.ids import BlockIndex, PeerId, RunId
from swarm_ft.protocol.messages.client import (
    BoundaryStatus,
    MemberStatus,
    MemberWork,
    RunSummary,
    SwarmStatus,
)
from swarm_ft.protocol.messages.control import Stage, stages_of
from swarm_ft.protocol.messages.events import EventKind, SwarmEvent
from swarm_ft.protocol.spec.sizes import format_size, format_traffic

WIDE_COLUMNS = 110
"""Width of a terminal from which on more columns are shown."""
EVENTS_ONCE = 10
"""Number of events on a screen without a fixed height."""
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
ALARMS = {
    EventKind.PEER_LEFT,
    EventKind.PEER_GONE,
    EventKind.PEER_SILENT,
    EventKind.PEER_REFUSED,
    EventKind.RUN_WAITING,
    EventKind.RUN_WENT_BACK,
    EventKind.RUN_FAILED,
    EventKind.SNAPSHOT_LOST,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The user's choices.

    Attributes:
        chosen: Run whose pipeline is shown; None for the first suitable one.
        is_frozen: Whether the screen is frozen.
        has_quit: Whether the user pressed q.
    """

    chosen: RunId | None = None
    is_frozen: bool = False
    has_quit: bool = False

    def after(self, key: str, found: SwarmStatus) -> View:
        """Return the view after a key; unknown keys change nothing."""
        if key in ("q", "Q"):
            return replace(self, has_quit=True)
        if key == "p":
            return replace(self, is_frozen=not self.is_frozen)
        by = {"\t": 1, "\x1b[B": 1, "\x1b[C": 1, "\x1b[A": -1, "\x1b[D": -1, "\x1b[Z": -1}.get(key)
        current = self.run_of(found)
        if by is None or current is None:
            return self
        names = [run.run_id for run in found.runs]
        return replace(self, chosen=names[(names.index(current.run_id) + by) % len(names)])

    def run_of(self, found: SwarmStatus) -> RunSummary | None:
        """Return the selected run: the chosen one, or else an active one, own runs first."""
        chosen = next((run for run in found.runs if run.run_id == self.chosen), None)
        ranked = sorted(found.runs, key=lambda run: (run.phase.is_over, not run.is_own))
        return chosen or next(iter(ranked), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopScreen:
    """The contents of the screen.

    Attributes:
        found: Newest status of the swarm.
        losses: Losses of each own run, one per step, in order.
        events: Events, oldest first.
        view: The user's choices.
        trouble: Reason why the status is out of date; empty if it is not.
        height: Lines of the screen, with the keys on the last one; None prints all lines once.
    """

    found: SwarmStatus
    losses: Mapping[RunId, Sequence[float]] = field(default_factory=dict)
    events: Sequence[SwarmEvent] = ()
    view: View = field(default_factory=View)
    trouble: str = ""
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def lines_of(parts: Iterable[RenderableType]) -> list[list[Segment]]:
            return console.render_lines(Group(*parts), options.reset_height(), pad=False)

        lines, keys = lines_of(self._head(options)), lines_of([self._keys()])
        room = EVENTS_ONCE if self.height is None else self.height - len(lines) - len(keys) - 2
        lines += lines_of(self._newest_events(lines_of, room))
        if self.height is not None:
            above = max(0, self.height - len(keys))
            lines = [*lines[:above], *([Segment("")] for _ in range(above - len(lines))), *keys]
        for number, line in enumerate(lines, 1):
            yield from line
            if number != self.height:
                yield Segment.line()

    # ---- the parts, from top to bottom

    def _head(self, options: ConsoleOptions) -> Iterator[RenderableType]:
        found, run = self.found, self.view.run_of(self.found)
        yield self._title()
        for one in found.runs:
            is_looked_at = run is not None and one.run_id == run.run_id
            yield from self._run(one, options, is_looked_at=is_looked_at)
        if not found.runs:
            yield Text("no run yet; 'swarm-ft client train' hands one in")
        if run is not None and run.assignments:
            yield _heading(f"pipeline of {run.run_id}")
            yield from _pipeline(run, found, options)
        working = {member.peer_id for member in found.members if _works_for(member, run)}
        others = [member for member in found.members if member.peer_id not in working]
        if others:
            yield _heading("other peers" if working else "peers")
            yield _others(others, found)
        if not found.members:
            yield Text(NO_PEERS)

    def _title(self) -> RenderableType:
        found = self.found
        when = datetime.fromtimestamp(found.unix_s).astimezone().strftime("%H:%M:%S")
        version = f" {found.version}" if found.version else ""
        counts = f"{_count(len(found.members), 'peer')}, {_count(len(found.runs), 'run')}"
        relayed = sum(relay.relayed_bytes for relay in found.relays)
        links = sum(relay.links for relay in found.relays)
        moved = format_traffic(relayed)
        relays = f", {_count(links, 'link')} over relays: {moved}" if relayed else ""
        state = "frozen  " if self.view.is_frozen else ""
        row = Table.grid(expand=True)
        row.add_column(ratio=1, no_wrap=True)
        row.add_column(justify="right", no_wrap=True)
        row.add_row(_text(f"swarm-ft{version}  {counts}{relays}", "bold"), _text(f"{state}{when}"))
        troubles = [_text(one, "red") for one in (self.trouble, *found.warnings) if one]
        return Group(row, *troubles)

    def _run(
        self, run: RunSummary, options: ConsoleOptions, *, is_looked_at: bool
    ) -> Iterator[RenderableType]:
        share = run.committed_steps / max(1, run.num_steps)
        own = "" if run.is_own else "  (another client's)"
        mark = ">" if is_looked_at and len(self.found.runs) > 1 else " "
        waits = "" if is_looked_at else waiting_words(run) or run.detail
        summary = (
            f"{mark} {run.run_id}  {run.phase.in_words(waits)}  "
            f"step {run.committed_steps:,}/{run.num_steps:,}  {share:.0%}{own}  "
        )
        losses = self.losses.get(run.run_id, ())
        room = max(0, options.max_width - len(summary))
        curve = sparkline(losses, min(room, 60), is_ascii=options.ascii_only)
        line = Text.assemble(_text(summary, "bold" if is_looked_at else ""), (curve, "cyan"))
        line.no_wrap = True
        yield line
        if not is_looked_at:
            return
        details = (waiting_words(run), run.detail, "  ".join(progress_words(run)))
        yield from (Padding(_text(detail), (0, 0, 0, 4)) for detail in details if detail)

    def _newest_events(
        self, lines_of: Callable[[list[RenderableType]], list[list[Segment]]], room: int
    ) -> list[RenderableType]:
        """Return the newest events that fit, oldest first."""
        shown: list[RenderableType] = []
        for event in reversed(self.events):
            row = _event(event)
            room -= len(lines_of([row]))
            if room < 0:
                break
            shown = [row, *shown]
        return [_heading("events"), *shown] if shown else []

    def _keys(self) -> Text:
        freeze = "continue" if self.view.is_frozen else "freeze"
        run = "   tab or arrows: other run" if len(self.found.runs) > 1 else ""
        return _text(f"q: quit   p: {freeze}{run}", "dim")


# ---- the pipeline


def _pipeline(
    run: RunSummary, found: SwarmStatus, options: ConsoleOptions
) -> Iterator[RenderableType]:
    """Yield a table of the stages with their replicas, and of the boundaries in between."""
    is_wide = options.max_width >= WIDE_COLUMNS
    names = short_names(found)
    members = {member.peer_id: member for member in found.members}
    between = {boundary.boundary: boundary for boundary in run.boundaries}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("layers", "peer", "device"):
        table.add_column(column, no_wrap=True)
    table.add_column("does", ratio=1)
    table.add_column("load", justify="right", no_wrap=True)
    table.add_column("Mbps", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    for column in ("links", "memory", "version", "samples") if is_wide else ():
        table.add_column(column, no_wrap=True)
    stages = stages_of(run.assignments)
    for above, stage in zip([None, *stages], stages, strict=False):
        boundary = between.get(BlockIndex(stage.layers.start))
        if boundary is not None and above is not None:
            crossing = _crossing(boundary, is_wide=is_wide)
            measured = _measured_between(above, stage, members)
            between_two = (_text(words, "dim") for words in (crossing, "", *measured))
            table.add_row("", "", "", *between_two)
        for peer in stage.peers:
            cells = _replica(run, stage, peer, members.get(peer), names)
            table.add_row(*cells[: len(table.columns)])
    yield table


def _crossing(boundary: BoundaryStatus, *, is_wide: bool) -> str:
    words = []
    if boundary.ratio is not None:
        codecs = (boundary.forward_codec, boundary.backward_codec)
        down_up = "{} down, {} up" if is_wide else "{}/{}"
        words.append(f"{down_up.format(*codecs)}: {boundary.ratio:.1f}x")
    if boundary.hit_rate is not None:
        words.append(f"{boundary.hit_rate:.0%} hits")
    return ", ".join(words)


def _measured_between(
    above: Stage, below: Stage, members: Mapping[PeerId, MemberStatus]
) -> tuple[str, str]:
    """Return Mbps down and up, and the round trip, of the slowest links between two stages."""
    down, up = (
        [
            link.speed
            for peer in one.peers
            if peer in members
            for link in members[peer].links
            if link.peer_id in other.peers
        ]
        for one, other in ((above, below), (below, above))
    )
    slowest = (
        min((s.bytes_per_s for s in way if s.bytes_per_s), default=0.0) for way in (down, up)
    )
    mbps = "/".join(f"{8e-6 * rate:.0f}" if rate else "?" for rate in slowest)
    trip_ms = 1e3 * max((s.least_round_trip_s for s in (*down, *up)), default=0.0)
    return mbps if mbps != "?/?" else "", f"{trip_ms:.0f}" if trip_ms else ""


def _replica(
    run: RunSummary,
    stage: Stage,
    peer: PeerId,
    member: MemberStatus | None,
    names: Mapping[PeerId, str],
) -> list[Text]:
    layers = str(stage.layers) if peer == stage.peers[0] else ""
    if member is None:
        return [_text(cell) for cell in (layers, names.get(peer, peer), "", "offline")]
    joining = "takes over; " if peer in run.joining else ""
    mbps, trip_ms = _measured(member)
    memory = format_size(member.memory_bytes) if member.memory_bytes else ""
    met = [link for link in member.links if link.way is not None]
    ways = ", ".join(f"{link.way} {names.get(link.peer_id, '?')}" for link in met)
    does = Text.assemble(joining, _does(member, member.work_in(run.run_id), names))
    plain = (
        (layers, names[peer], member.device),
        (_load(run, member), mbps, trip_ms, ways, memory, member.version),
        (f"{member.given.samples:,}",),
    )
    (place, measured, given) = ([_text(cell) for cell in cells] for cells in plain)
    return [*place, does, *measured, *given]


def _does(member: MemberStatus, work: MemberWork | None, names: Mapping[PeerId, str]) -> Text:
    if work is None:
        return _text(member.idle or "nothing")
    if work.waits_for:
        waited = ", ".join(names.get(peer, peer) for peer in work.waits_for)
        return _text(f"waits for {waited}", "yellow")
    done = f" {work.parts_begun}/{work.num_parts}" if work.num_parts else ""
    return _text(f"{work.doing.name.lower()}{done}", "green")


def _all_it_does(member: MemberStatus, names: Mapping[PeerId, str]) -> Iterator[Text]:
    for work in member.works:
        yield Text.assemble(f"{work.run_id}: ", _does(member, work, names))
    if not member.works:
        yield _does(member, None, names)


def _load(run: RunSummary, member: MemberStatus) -> str:
    """Return the share of a step in which the member computes; empty if it is unknown."""
    work = member.work_in(run.run_id)
    if work is None or not (work.share and work.microbatch_s and run.step_s):
        return ""
    return f"{min(1.0, work.share * work.microbatch_s / run.step_s):.0%}"


def _measured(member: MemberStatus) -> tuple[str, str]:
    """Return Mbps up and down, and the round trip, between the member and the coordinator."""
    machine = member.machine
    if not machine.up_bytes_per_s:
        return "", ""
    up, down = (8e-6 * rate for rate in (machine.up_bytes_per_s, machine.down_bytes_per_s))
    return f"{up:.0f}/{down:.0f}", f"{1e3 * machine.round_trip_s:.0f}"


def _works_for(member: MemberStatus, run: RunSummary | None) -> bool:
    peers = (assigned.peer_id for assigned in run.assignments) if run is not None else ()
    return member.peer_id in peers


def _others(members: Iterable[MemberStatus], found: SwarmStatus) -> Table:
    names = short_names(found)
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column()
    for member in members:
        layers = f"layers {member.layers or 'auto'}"
        table.add_row(
            *(_text(cell) for cell in (names[member.peer_id], member.device, layers)),
            Text.assemble(
                Text("; ").join(_all_it_does(member, names)),
                f"; gave {member.given}" if member.given.steps else "",
            ),
        )
    return table


# ---- small things


def sparkline(values: Sequence[float], width: int, *, is_ascii: bool = False) -> str:
    """Draw a curve in one line, scaled to its range; each letter is the mean of some values.

    Args:
        values: Values in order; the function skips those that are not finite.
        width: Maximum number of letters.
        is_ascii: Whether to avoid block characters.
    """
    known = [value for value in values if math.isfinite(value)]
    width = min(width, len(known))
    cuts = [place * len(known) // width for place in range(width + 1)] if width else []
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = (min(means), max(means)) if means else (0.0, 0.0)
    bars = ASCII_BARS if is_ascii else BARS
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def _event(event: SwarmEvent) -> Table:
    when = datetime.fromtimestamp(event.unix_s).astimezone().strftime("%H:%M:%S")
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True, min_width=14)
    row.add_column(overflow="fold")
    style = "yellow" if event.kind in ALARMS else ""
    row.add_row(_text(when), _text(event.kind.label, style), _text(event_words(event)))
    return row


def _heading(words: str) -> Group:
    return Group(Text(), _text(words, "bold"))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _text(words: str, style: str = "") -> Text:
    return Text(printable(words), style=style)
