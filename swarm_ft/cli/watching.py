"""`swarm-ft events` and `losses`: what happened and why, how a run learns; words of `status`.

They ask the coordinator alone. With an invitation, or its address, nothing else is opened: no DHT,
no torch; so each takes a fraction of a second.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from swarm_ft.api.documents import event_fields, row_fields
from swarm_ft.api.joining import WayIn, client_key_file, connected
from swarm_ft.cli.joining import way_in
from swarm_ft.cli.options import examples, json_flag, log_option, stack

if TYPE_CHECKING:
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.ids import RunId
    from swarm_ft.protocol.messages.capacity import LinkSpeed
    from swarm_ft.protocol.messages.client import (
        BoundaryStatus,
        Evaluated,
        MemberLink,
        MemberStatus,
        MemberWork,
        RunSummary,
        StepCommitted,
        SwarmStatus,
    )
    from swarm_ft.protocol.messages.events import SwarmEvent, WentBack

WATCH_S = 1.0
NEWEST_EVENTS = 100
"""That are shown of a swarm if nobody says since when."""
CSV_COLUMNS = (
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "seconds",
    "eval_loss",
    "compressed_eval_loss",
)

look_options = stack(way_in(by_address=True), log_option)
run_option = click.option("--run", "run_name", metavar="ID", help="This run alone.")


@asynccontextmanager
async def looking(way: WayIn) -> AsyncIterator[SwarmClient]:
    """A client that asks the coordinator and nobody else; raises as `joined` does.

    With an invitation the coordinator is where that says, or was told. Without one, and without
    its address, the DHT has to be asked, which takes seconds.
    """
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.discovery.directory import KnownCoordinator
    from swarm_ft.transport.grpc_options import GrpcOptions
    from swarm_ft.transport.grpc_transport import GrpcTransport

    if way.invite is None and way.coordinator is None:
        async with connected(way) as swarm:
            yield swarm
        return
    if way.invite is None:
        credentials, found = None, way.coordinator
    else:
        from swarm_ft.enrol import enrol
        from swarm_ft.identity.keys import key_at

        member = await enrol(way.invite, key_at(client_key_file()))
        credentials, found = member.credentials, way.coordinator or member.coordinator
    transport = GrpcTransport(GrpcOptions(credentials=credentials))
    yield SwarmClient(KnownCoordinator(found or ""), transport)


# ---- status, in full


def verbose_lines(found: SwarmStatus) -> Iterator[str]:
    """All that the coordinator knows, for people: warnings, runs, peers, relays, who is away."""
    from rich.filesize import decimal

    from swarm_ft.protocol.messages.enrolment import name_lookup

    name_of = name_lookup(found.names)
    yield from (f"warning: {one}" for one in found.warnings)
    for run in found.runs:
        yield from _run_lines(run, name_of)
    for member in found.members:
        yield from _member_lines(member, name_of)
    if not found.members:
        yield "no peer is there; start some with 'swarm-ft serve-stage'"
    for relay in found.relays:
        moved = decimal(relay.relayed_bytes)
        name = name_of(relay.name) if relay.name else "of the coordinator"
        named = f"relay {name} at {relay.endpoint}"
        yield f"{named}  {relay.links} links, {moved} so far"
    here = {member.peer_id for member in found.members}
    for one in found.contributors:
        if one.peer_id not in here:
            yield f"peer {name_of(one.peer_id)}  not here now; gave {one.given}"


def _member_lines(member: MemberStatus, name_of: Callable[[str], str]) -> Iterator[str]:
    from swarm_ft.protocol.spec.sizes import size_words

    name = name_of(member.peer_id)
    key = "" if name == member.peer_id else f"  ({member.peer_id})"
    granted = f"  ({member.grant})" if str(member.grant) else ""
    idle = f"  idle: {member.idle}" if member.idle else ""
    yield f"peer {name}{key}  layers {member.layers or 'auto'}{granted}{idle}"
    machine = member.machine
    words = [
        member.device,
        f"{size_words(member.memory_bytes)} lent" if member.memory_bytes else "",
        f"swarm-ft {member.version}" if member.version else "",
        f"at {member.endpoint}" if member.endpoint else "",
        f"heard {member.heard_ago_s:.0f} s ago" if member.heard_ago_s >= 1.0 else "",
    ]
    if any(words):
        yield f"  {', '.join(filter(None, words))}"
    for work in member.works:
        yield f"  {_work_words(work, name_of)}"
    links = [link_words(link, name_of(link.peer_id)) for link in member.links]
    if machine.up_bytes_per_s:
        up, down = (8e-6 * rate for rate in (machine.up_bytes_per_s, machine.down_bytes_per_s))
        trip = f"{1e3 * machine.round_trip_s:.0f} ms there and back"
        links.append(f"coordinator: {up:.0f} Mbps up, {down:.0f} down, {trip}")
    if links:
        yield f"  links: {', '.join(links)}"
    if member.given.steps:
        yield f"  gave {member.given}"


def _work_words(work: MemberWork, name_of: Callable[[str], str]) -> str:
    does = work.doing.name.lower()
    if work.waits_for:
        does = f"waits for {', '.join(map(name_of, work.waits_for))}"
    replica = f", replica {work.replica + 1} of {work.num_replicas}"
    where = f"layers {work.layers}{replica if work.num_replicas > 1 else ''}"
    noun = "microbatch" if work.share == 1 else "microbatches"
    share = f"; {work.share} {noun} a step" if work.share else ""
    speed = f", {work.microbatch_s:.3g} s each" if work.share and work.microbatch_s else ""
    return f"{work.run_id}, {where}: {does}{share}{speed}"


def link_words(link: MemberLink, name: str) -> str:
    """How a member reaches another one of that name, and what it measured."""
    way = f"{link.way} to " if link.way is not None else "to "
    measured = speed_words(link.speed)
    return f"{way}{name}{f' ({measured})' if measured else ''}"


def speed_words(speed: LinkSpeed) -> str:
    """What was measured of a link: the way there, and there and back without a queue."""
    words = []
    if speed.bytes_per_s:
        words.append(f"{8e-6 * speed.bytes_per_s:.3g} Mbps")
    if speed.least_round_trip_s:
        words.append(f"{1e3 * speed.least_round_trip_s:.3g} ms")
    return ", ".join(words)


def _run_lines(run: RunSummary, name_of: Callable[[str], str]) -> Iterator[str]:
    from swarm_ft.client.words import kind_lines
    from swarm_ft.protocol.messages.control import stages_of

    counted = f"step {run.committed_steps}/{run.num_steps}"
    words = run.phase.in_words(waiting_words(run) or run.detail)
    own = "" if run.is_own else "  (another client's)"
    yield f"run {run.run_id}  {counted}  {words}{own}"
    how = "  ".join(progress_words(run))
    if how:
        yield f"  {how}"
    if run.snapshots:
        yield f"  snapshots of steps {', '.join(map(str, run.snapshots))}"
    for stage in stages_of(run.assignments):
        peers = ((name_of(peer), peer in run.joining) for peer in stage.peers)
        names = (f"{name} (joining)" if is_joining else name for name, is_joining in peers)
        yield f"  layers {stage.layers}  {', '.join(names)}"
    yield from (f"  {line}" for line in kind_lines(run.sent))
    yield from (f"  {line}" for boundary in run.boundaries for line in _about(boundary))


def waiting_words(run: RunSummary) -> str:
    """Where it stands in the queue, if it does."""
    if run.behind is None:
        return ""
    return f"place {run.place}, after {run.behind}"


def progress_words(run: RunSummary) -> Iterator[str]:
    """How a run learns, how fast, and for how long."""
    from rich.filesize import decimal

    last, found = run.last_step, run.last_evaluation
    if last is not None:
        yield f"loss {last.loss:.3f}"
        yield f"lr {last.learning_rate:.3g}"
    if found is not None:
        yield f"evaluation {found.loss:.3f} (step {found.step})"
    if run.step_s and not run.phase.is_over:
        yield f"{run.step_s:.3g} s a step"
        yield f"{run.samples_per_s:.3g} samples/s"
    if run.tokens_per_s and not run.phase.is_over:
        yield f"{run.tokens_per_s:,.0f} tokens/s"
    if run.eta_s is not None:
        yield f"ETA {_eta_words(run)}"
    if run.bytes_saved > 0 and last is not None:
        yield f"saved {decimal(run.bytes_saved)}"
    if run.quality is not None:
        yield str(run.quality)


def _eta_words(run: RunSummary) -> str:
    """Return how long a run takes yet, as a range."""
    from swarm_ft.client.words import clock_time

    low, high = clock_time(run.eta_low_s), clock_time(run.eta_high_s)
    return (
        f"{low} to {high}" if run.eta_low_s is not None and low != high else clock_time(run.eta_s)
    )


def _about(status: BoundaryStatus) -> Iterator[str]:
    """What is kept at a boundary that keeps buffers, or sent frames that could build on some."""
    from swarm_ft.protocol.spec.sizes import size_words

    kept = status.kept
    if status.ratio is not None:
        codecs = f"{status.forward_codec} down, {status.backward_codec} up"
        yield f"boundary {status.boundary:<11} {codecs}: {status.ratio:.1f} times fewer bytes"
    if status.hit_rate is not None and (status.delta_frames or kept.samples):
        yield (
            f"boundary {status.boundary:<11} {status.buffered_samples} samples remembered, "
            f"{status.hit_rate:.1%} of frames built on one ({status.key_frames} key, "
            f"{status.delta_frames} delta frames)"
        )
    if kept.samples:
        yield (
            f"{'':<20} {size_words(kept.memory_bytes)} in memory, "
            f"{size_words(kept.disk_bytes)} on disk; "
            f"read {kept.memory_hits} times from memory, {kept.disk_hits} from disk, "
            f"{kept.misses} not there; {kept.evictions} evicted, {kept.repairs} repaired"
        )


# ---- events


@click.command(
    epilog=examples(
        "swarm-ft events --invite @invitation.txt",
        "swarm-ft events --invite @invitation.txt --follow --json",
        "swarm-ft events --invite @invitation.txt --run run-1a2b3c4d --since 0",
    )
)
@click.option("--follow", "follows", is_flag=True, help="Go on telling, until Ctrl-C.")
@click.option(
    "--since",
    type=click.IntRange(0),
    metavar="SERIAL",
    help=f"From this number on.  [default: the newest {NEWEST_EVENTS}, or all of --run]",
)
@run_option
@look_options
@json_flag
def events(
    way: WayIn, follows: bool, since: int | None, run_name: str | None, as_json: bool
) -> None:
    """Show what happened in the swarm, and why."""
    from swarm_ft.cli.running import run_async, run_until_stopped
    from swarm_ft.ids import RunId

    async def work() -> None:
        run_id = RunId(run_name) if run_name else None
        async with looking(way) as swarm:
            first = since if since is not None else await _newest(swarm, run_id)
            told = swarm.events(first, run_id=run_id, follows=follows, on_trouble=_tell_trouble)
            async with aclosing(told):
                async for event in told:
                    click.echo(json.dumps(event_fields(event)) if as_json else event_line(event))

    (run_until_stopped if follows else run_async)(work)


async def _newest(swarm: SwarmClient, run_id: RunId | None) -> int:
    if run_id is not None:
        return 0
    return max(0, (await swarm.status()).next_event - NEWEST_EVENTS)


def event_line(event: SwarmEvent) -> str:
    """What people read."""
    from swarm_ft.client.words import printable

    when = datetime.fromtimestamp(event.unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    words = event_words(event)
    return printable(f"{event.serial:>6}  {when}  {event.kind.label:<15} {words}").rstrip()


def event_words(event: SwarmEvent) -> str:
    """What happened, and to which run."""
    from swarm_ft.protocol.spec.member_name import default_name

    about = f"{event.run_id}: " if event.run_id else ""
    peer = event.peer_name or default_name(event.peer_id or "")
    words = event.words or f"{peer} (another client's)".strip()
    return f"{about}{words}"


# ---- losses


@click.command(
    short_help="Show a run's losses, step by step.",
    epilog=examples(
        "swarm-ft losses --invite @invitation.txt",
        "swarm-ft losses --invite @invitation.txt --run run-1a2b3c4d --csv > losses.csv",
        "swarm-ft losses --invite @invitation.txt --follow --json",
    ),
)
@click.option("--run", "run_name", metavar="ID", help="The run.  [default: your newest]")
@click.option("--follow", "follows", is_flag=True, help="Go on until the run is over, or Ctrl-C.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@look_options
@json_flag
def losses(way: WayIn, run_name: str | None, follows: bool, as_csv: bool, as_json: bool) -> None:
    """Show a run's steps (loss, learning rate, gradient norm, seconds) and evaluations."""
    from swarm_ft.cli.running import run_async, run_until_stopped
    from swarm_ft.errors import BadOption

    if as_csv and as_json:
        raise BadOption("--csv, --json: give one of the two")

    async def work() -> None:
        async with looking(way) as swarm:
            run = _chosen(await swarm.status(), run_name)
            if as_csv:
                click.echo(",".join(CSV_COLUMNS))
            async for told in told_of(swarm, run, follows=follows):
                for line in _loss_lines(told, as_json=as_json, as_csv=as_csv):
                    click.echo(line)

    (run_until_stopped if follows else run_async)(work)


def _chosen(found: SwarmStatus, name: str | None) -> RunSummary:
    """The caller's run of this name, or its newest.

    Raises:
        NotFound: it has none.
    """
    from swarm_ft.errors import NotFound

    own = {run.run_id: run for run in found.runs if run.is_own}
    chosen = next((r for i, r in own.items() if i == name), None)
    if name is None and own:
        chosen = list(own.values())[-1]
    if not own and name is None:
        raise NotFound("you have no runs yet; 'swarm-ft client train' submits one")
    if chosen is None:
        known = ", ".join(own) or "none"
        raise NotFound(f"--run: expected one of your runs ({known}), got {name or 'none'}")
    return chosen


async def told_of(
    swarm: SwarmClient, run: RunSummary, *, follows: bool
) -> AsyncGenerator[StepCommitted | Evaluated | WentBack, None]:
    """All steps and evaluations until now; then, if it follows, what comes."""
    from swarm_ft.protocol.messages.client import RunStatus, StepCommitted
    from swarm_ft.protocol.messages.events import WentBack

    left = {("step", run.committed_steps - 1)} if run.committed_steps else set()
    if run.last_evaluation is not None:
        left.add(("evaluation", run.last_evaluation.step))
    num_statuses = 0
    async with aclosing(swarm.watch(run.run_id, _tell_trouble)) as watching:
        async for event in watching:
            if isinstance(event, RunStatus):
                num_statuses += 1  # the second follows all that was
            elif isinstance(event, WentBack):
                yield event
            else:
                is_step = isinstance(event, StepCommitted)
                left.discard(("step" if is_step else "evaluation", event.step))
                yield event
            if not follows and (not left or num_statuses > 1):
                return


def _loss_lines(
    told: StepCommitted | Evaluated | WentBack, *, as_json: bool, as_csv: bool
) -> Iterator[str]:
    from swarm_ft.client.words import printable
    from swarm_ft.protocol.messages.events import WentBack

    if isinstance(told, WentBack):
        if as_json:
            yield json.dumps({"went_back": asdict(told)})
        else:
            click.echo(printable(told.words), err=as_csv)
        return
    fields = row_fields(told)
    if as_json:
        yield json.dumps(fields)
    elif as_csv:
        cells = (fields.get(name) for name in CSV_COLUMNS)
        yield ",".join("" if cell is None else str(cell) for cell in cells)
    else:
        yield _row_words(told)


def _row_words(told: StepCommitted | Evaluated) -> str:
    from swarm_ft.protocol.messages.client import StepCommitted

    if not isinstance(told, StepCommitted):
        return f"step {told.step:>6}  evaluation loss {told.loss:.4f}"
    return (
        f"step {told.step:>6}  loss {told.loss:<8.4f} lr {told.learning_rate:<10.3g} "
        f"grad norm {told.grad_norm:<9.3g} {told.seconds:.2f} s"
    )


def _tell_trouble(words: str) -> None:
    click.echo(f"swarm-ft: {words}", err=True)
