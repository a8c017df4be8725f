"""A swarm on one screen: its warnings, then one line per run, then one line per peer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from swarm_ft.cli.status_text import NO_PEERS, progress_words, waiting_words
from swarm_ft.client.formatting import printable
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import (
    MemberStatus,
    MemberWork,
    RunSummary,
    SwarmStatus,
)
from swarm_ft.protocol.messages.enrolment import name_lookup
from swarm_ft.protocol.spec.sizes import format_size, format_traffic

MIN_NAME_CHARS = 24
"""Letters of a shortened name; more if two names begin alike."""
MAX_DEVICE_CHARS = 28
SILENT_S = 10.0
"""Seconds without a heartbeat after which a peer is shown as silent."""


def overview_lines(found: SwarmStatus, width: int | None = None) -> Iterator[str]:
    """Yield the lines of the screen.

    Args:
        found: Status of the swarm.
        width: Columns of the terminal, to which lines are cut; None leaves them whole.
    """
    for line in _lines(found):
        text = printable(line)
        is_long = width is not None and len(text) > width
        yield f"{text[: (width or 0) - 3]}..." if is_long else text


def _lines(found: SwarmStatus) -> Iterator[str]:
    yield _title(found)
    yield from (f"warning: {one}" for one in found.warnings)
    names = short_names(found)
    if found.runs:
        yield from _table(("RUN", "STEPS", "STATE"), map(_run_row, found.runs))
    if found.members:
        rows = (_member_row(member, names) for member in found.members)
        yield from _table(("PEER", "LAYERS", "LENDS", "DEVICE", "WORK"), rows)
    else:
        yield NO_PEERS
    if found.runs or found.members:
        yield f"{_others(found)}--verbose: links, stages, buffers, contributions"


def _title(found: SwarmStatus) -> str:
    version = f"swarm-ft {found.version}: " if found.version else ""
    return f"{version}{_count(len(found.members), 'peer')}, {_count(len(found.runs), 'run')}"


def _others(found: SwarmStatus) -> str:
    """Count the relays' links, and the contributors that are offline."""
    present = {member.peer_id for member in found.members}
    offline = sum(one.peer_id not in present for one in found.contributors)
    links = sum(relay.links for relay in found.relays)
    moved = format_traffic(sum(relay.relayed_bytes for relay in found.relays))
    has_relayed = links or any(relay.relayed_bytes for relay in found.relays)
    relayed = f"{_count(links, 'link')} over relays, {moved}; " if has_relayed else ""
    peers = f"{_count(offline, 'peer')} offline; " if offline else ""
    return f"{relayed}{peers}"


# ---- a run


def _run_row(run: RunSummary) -> tuple[str, ...]:
    detail = waiting_words(run) or run.detail
    parts = [run.phase.in_words(detail), *progress_words(run)]
    if run.assignments and not run.phase.is_over:
        parts.append(f"on {_count(len({one.peer_id for one in run.assignments}), 'peer')}")
    if not run.is_own:
        parts.append("another client's")
    return str(run.run_id), f"{run.committed_steps:,}/{run.num_steps:,}", ", ".join(parts)


# ---- a peer


def _member_row(member: MemberStatus, names: Mapping[PeerId, str]) -> tuple[str, ...]:
    device = member.device[:MAX_DEVICE_CHARS] or "?"
    lends = format_size(member.memory_bytes) if member.memory_bytes else "?"
    work = "; ".join(_work(one, names) for one in member.works)
    idle = f"idle: {member.idle}" if member.idle else "idle"
    is_silent = member.heard_ago_s >= SILENT_S
    silent = f"silent for {member.heard_ago_s:.0f} s; " if is_silent else ""
    layers = str(member.layers or "auto")
    return names[member.peer_id], layers, lends, device, f"{silent}{work or idle}"


def _work(work: MemberWork, names: Mapping[PeerId, str]) -> str:
    does = work.doing.name.lower()
    if work.waits_for:
        does = f"waits for {', '.join(names.get(one, one) for one in work.waits_for)}"
    return f"{work.run_id} layers {work.layers} {does}"


# ---- small things


def short_names(found: SwarmStatus) -> Mapping[PeerId, str]:
    """Return a short form of each peer's name by its id; all short forms differ."""
    present = {member.peer_id for member in found.members}
    peers = present | {one.peer_id for run in found.runs for one in run.assignments}
    shown = dict(zip(peers, map(name_lookup(found.names), peers), strict=True))
    longest = max(map(len, shown.values()), default=0)
    for length in range(MIN_NAME_CHARS, longest):
        cut = {i: name if len(name) <= length + 2 else name[:length] for i, name in shown.items()}
        if len(set(cut.values())) == len(cut):
            return cut
    return shown


def _table(title: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; each column but the last is as wide as its longest cell."""
    lines = [title, *rows]
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    for *cells, last in lines:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        yield "  ".join((*padded, last))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
