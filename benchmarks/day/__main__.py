"""Ten minutes of a swarm: volunteers come, pause, leave and fail while two owners train in it.

    python -m benchmarks.day [--minutes 10] [--markdown FILE] [--keep DIR]

Coordinator, peers and clients are processes, links have keys and caps. First both owners train
quietly, on machines of their own alone; then they do so again, side by side, while three volunteers
act by `script`. All of that must be reported by `swarm-ft events` and `status`, on the page and
in the metrics; no run may go back, and all losses have to be those of the quiet runs, to the last
bit. A table lists the deeds and the reports about them. Exit code 1: a report was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.day.observed import Observed, observed
from benchmarks.day.script import SCRIPT, Act, Cue
from benchmarks.day.swarm import OWNERS, Swarm
from benchmarks.day.verdict import Deed, as_markdown, counts_in_words, problems, unlike

STEPS_PER_MINUTE = 50
"""About what links with these caps let through; the script goes by steps."""

Reports = dict[str, dict[str, Any]]


def main() -> None:
    """Run the day and print its results."""
    options = _parser().parse_args()
    with ExitStack() as stack:
        folder = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="day-"))
        )
        steps = round(options.minutes * STEPS_PER_MINUTE)
        text, wrong = asyncio.run(day(folder, steps))
    sys.stdout.write(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    for words in wrong:
        sys.stderr.write(f"{words}\n")
    sys.exit(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="about so long, by its steps")
    parser.add_argument("--markdown", type=Path, help="write the table there too")
    parser.add_argument("--keep", type=Path, help="a folder for logs, journal and results")
    return parser


async def day(folder: Path, steps: int) -> tuple[str, list[str]]:
    """Run the day; return its table with the sums below, and the problems found."""
    quiet = await quietly(folder / "quiet", steps)
    async with opened(Swarm(folder / "day", steps)) as swarm, observed(swarm) as seen:
        began_s = time.time()
        clients = [await swarm.trains(owner) for owner in OWNERS]
        deeds = [await done(cue, swarm, seen, steps) for cue in SCRIPT]
        for client in clients:
            await client.ends(timeout_s=60.0 * steps)
        left = [name for name, machine in swarm.machines.items() if machine.is_alive]
        deeds += [await done(Cue(1.0, name, Act.LEAVES), swarm, seen, steps) for name in left]
        took_s = time.time() - began_s
        await all_reported(seen)
    reports = {owner: swarm.report(owner) for owner in OWNERS}
    wrong = [*problems(deeds, seen), *unlike(quiet, reports)]
    sums = _sums(reports, seen, took_s, is_like=not wrong)
    return f"{as_markdown(deeds, seen, OWNERS, began_s)}\n{sums}\n", wrong


async def quietly(folder: Path, steps: int) -> Reports:
    """Run the owners' jobs in a quiet swarm and return their reports."""
    async with opened(Swarm(folder, steps, is_quiet=True)) as swarm:
        for owner in OWNERS:
            await (await swarm.trains(owner)).ends(timeout_s=60.0 * steps)
        return {owner: swarm.report(owner) for owner in OWNERS}


@asynccontextmanager
async def opened(swarm: Swarm) -> AsyncIterator[Swarm]:
    """Open a swarm that closes with the context."""
    try:
        await swarm.open()
        yield swarm
    finally:
        await swarm.close()


# ---- what is done


async def done(cue: Cue, swarm: Swarm, seen: Observed, steps: int) -> Deed:
    """Do it when it is time, and wait until whoever does it sees that it is done."""
    await seen.until(lambda now: min(steps_of(now)) >= cue.part * steps)
    now_steps, unix_s, name = steps_of(seen), time.time(), cue.machine
    match cue.act:
        case Act.COMES:
            await swarm.comes(name)
        case Act.PAUSES:
            await swarm.pauses(name)
        case Act.RESUMES:
            await swarm.resumes(name)
        case Act.LEAVES:
            await swarm.leaves(name)
        case Act.FAILS:
            await swarm.fails(name)
        case Act.FREEZES:
            swarm.signals(name, signal.SIGSTOP)
            await seen.until(lambda now: is_gone(now, swarm.names[name], unix_s))
        case Act.THAWS:
            swarm.signals(name, signal.SIGCONT)
    deed = Deed(unix_s, time.time(), name, swarm.names[name], cue.act, now_steps)
    sys.stderr.write(f"steps {now_steps}: {name} {cue.act.value}\n")
    return deed


def steps_of(seen: Observed) -> tuple[int, ...]:
    """Return the steps of both owners' runs; the first owner's status shows which is its own."""
    runs = sorted(seen.newest.get("runs", ()), key=lambda run: not run["own"])
    steps = tuple(run["steps"] for run in runs)
    return (*steps, *[0] * (len(OWNERS) - len(steps)))


def is_gone(seen: Observed, peer: str, since_s: float) -> bool:
    """Whether a peer was given up from then on."""
    return any(
        event["kind"] == "peer-gone" and event["peer"] == peer and event["unix_s"] >= since_s
        for event in seen.events
    )


async def all_reported(seen: Observed) -> None:
    """Wait until the last event of each way has arrived in all."""
    newest, num_samples = seen.newest.get("next_event", 0), (len(seen.page), len(seen.status))
    await seen.until(
        lambda now: bool(
            now.events
            and now.newest["next_event"] >= newest
            and now.events[-1]["serial"] + 1 >= now.newest["next_event"]
            and {event["serial"] for event in now.page_events} >= now.events_by_serial.keys()
            and sum(now.counts.values()) == len(now.events)
            and len(now.page) > num_samples[0] + 2
            and len(now.status) > num_samples[1] + 2
        )
    )


def _sums(reports: Reports, seen: Observed, took_s: float, *, is_like: bool) -> str:
    lines = [f"{took_s / 60:.1f} minutes; {counts_in_words(seen)}."]
    for owner, report in reports.items():
        first, last = report["losses"][0], report["losses"][-1]
        lines.append(
            f"{owner}'s run: {report['steps']} steps, loss {first:.3f} -> {last:.3f}, "
            f"went back {len(report['went_back'])} times."
        )
    if is_like:
        lines.append("Everything was told everywhere; all losses are the quiet runs', bit for bit.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
