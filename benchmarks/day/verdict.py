"""A check that every deed was reported everywhere and did no harm, and the day's table. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.day.observed import Observed, Sample
from benchmarks.day.script import IN_WORDS, REPORTED_AS, Act

CLOCKS_S = 1.0
"""That what is told is of before it was seen to be done, at most."""
MAX_WORDS = 160

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Deed:
    """Something that was done.

    Attributes:
        unix_s: when it was begun; `ended_s` when it was done, as far as its doer could see.
        peer: the machine's name in the swarm.
        steps: of each owner's run, then.
    """

    unix_s: float
    ended_s: float
    machine: str
    peer: str
    act: Act
    steps: tuple[int, ...]


def events_of(deed: Deed, events: Sequence[Document]) -> list[Document]:
    """Return the first event of each kind that this deed must cause on its machine."""
    found = []
    for kind in REPORTED_AS[deed.act]:
        due = (
            event
            for event in events
            if event["kind"] == kind
            and event["unix_s"] >= deed.unix_s - CLOCKS_S
            and (event["peer"] == deed.peer or deed.peer in event["words"])
        )
        found += [event for event in [next(due, None)] if event is not None]
    return found


def problems(deeds: Sequence[Deed], seen: Observed) -> Iterator[str]:
    """Yield the differences from what the deeds must cause, as texts."""
    for deed in deeds:
        subject = f"{deed.machine} {deed.act.value}"
        for name, events in (("events", seen.events), ("the page", seen.page_events)):
            kinds = {event["kind"] for event in events_of(deed, events)}
            for kind in set(REPORTED_AS[deed.act]) - kinds:
                yield f"{subject}: no {kind} in {name}"
        for name, samples in (("the page", seen.page), ("status", seen.status)):
            if not is_shown(deed, samples):
                yield f"{subject}: {name} does not show it"
    yield from _differences(seen)
    for event in seen.events:
        if event["kind"] in ("went-back", "failed"):
            yield f"{event['kind']}: {event['words']}"


def _differences(seen: Observed) -> Iterator[str]:
    """Yield the differences between three ways of reporting."""
    on_page = {event["serial"] for event in seen.page_events}
    for event in seen.events:
        if event["serial"] not in on_page:
            yield f"event {event['serial']}, {event['kind']}: not on the page"
    counted = Counter(event["kind"] for event in seen.events)
    for kind, count in seen.counts.items():
        if counted[kind] != count:
            yield f"{kind}: {count} in the metrics, {counted[kind]} in events"


def is_shown(deed: Deed, samples: Sequence[Sample]) -> bool:
    """Whether who is there, and what it is at, was shown so from the deed on."""
    later = [sample for sample in samples if sample.unix_s >= deed.unix_s]
    match deed.act:
        case Act.COMES | Act.THAWS:
            return any(deed.peer in sample.idle for sample in later)
        case Act.PAUSES:
            return any(sample.idle.get(deed.peer, "").startswith("paused") for sample in later)
        case Act.RESUMES:
            return any(
                deed.peer in sample.idle and not sample.idle[deed.peer].startswith("paused")
                for sample in later
            )
        case Act.LEAVES | Act.FAILS | Act.FREEZES:
            return any(deed.peer not in sample.idle for sample in later)


def unlike(quiet: Mapping[str, Document], disturbed: Mapping[str, Document]) -> Iterator[str]:
    """Yield the differences between reports of owners' runs and of quiet runs, as texts."""
    for owner, report in disturbed.items():
        if report["went_back"]:
            yield f"{owner}'s run went back: {report['went_back']}"
        for key in ("losses", "evaluations"):
            if report[key] != quiet[owner][key]:
                yield f"{owner}'s {key} are not those of the quiet run"


# ---- for people


def as_markdown(
    deeds: Sequence[Deed], seen: Observed, owners: Sequence[str], began_s: float
) -> str:
    """Format a row for each deed: its time, the deed, and the events about it."""
    names = {deed.peer: deed.machine for deed in deeds}
    steps = " | ".join(f"{owner}'s step" for owner in owners)
    rows = [f"| at | {steps} | what was done | what `events`, the page and the metrics had |"]
    rows += ["|" + " --- |" * (len(owners) + 3)]
    for deed in deeds:
        cell = "; ".join(_in_short(event, names) for event in events_of(deed, seen.events))
        at, done = _clock(deed.unix_s - began_s), f"{deed.machine} {IN_WORDS[deed.act]}"
        rows.append(f"| {at} | {' | '.join(map(str, deed.steps))} | {done} | {cell} |")
    return "\n".join(rows) + "\n"


def _in_short(event: Document, names: Mapping[str, str]) -> str:
    words = event["words"]
    for peer, name in names.items():
        words = words.replace(peer, name)
    words = words if len(words) <= MAX_WORDS else words[: MAX_WORDS - 3] + "..."
    return f"`{event['serial']} {event['kind']}` {words}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def counts_in_words(seen: Observed) -> str:
    """Count the events of each kind, as a text."""
    counted = Counter(event["kind"] for event in seen.events)
    listed = ", ".join(f"{count} {kind}" for kind, count in counted.most_common())
    return f"{len(seen.events)} events: {listed}"
