"""The commands `swarm-ft events` and `losses`, and the texts of `status`.

They connect to the coordinator alone. With an invitation or the coordinator's address they need
neither the DHT nor torch, and take a fraction of a second.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from swarm_ft.api.connections import SwarmAddress, client_key_file, connect
from swarm_ft.api.documents import event_fields, row_fields
from swarm_ft.cli.options import examples, json_flag, log_option, stack
from swarm_ft.cli.swarm_options import way_in
from swarm_ft.protocol.spec.sizes import format_size, format_traffic

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
    from swarm_ft.protocol.messages.events import Rollback, SwarmEvent

WATCH_S = 1.0
NEWEST_EVENTS = 100
"""Number of newest events that are shown without `--since`."""
NO_PEERS = "no peers yet; 'swarm-ft serve-stage' lends a machine"
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
run_option = click.option(
    "--run", "run_name", metavar="ID", help="Id of a run, to show its events only."
)


@asynccontextmanager
async def connect_to_coordinator(way: SwarmAddress) -> AsyncIterator[SwarmClient]:
    """Connect a client to the coordinator alone; raises as `joined` does.

    The coordinator's address comes from the command line or the invitation. Without either, a
    lookup in the DHT takes seconds.
    """
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.discovery.directory import KnownCoordinator
    from swarm_ft.transport.grpc_options import GrpcOptions
    from swarm_ft.transport.grpc_transport import GrpcTransport

    if way.invite is None and way.coordinator is None:
        async with connect(way) as swarm:
            yield swarm
        return
    if way.invite is None:
        credentials, found = None, way.coordinator
    else:
        from swarm_ft.identity.keys import key_at
        from swarm_ft.net.enrol import enrol

        member = await enrol(way.invite, key_at(client_key_file()))
        credentials, found = member.credentials, way.coordinator or member.coordinator
    transport = GrpcTransport(GrpcOptions(credentials=credentials))
    yield SwarmClient(KnownCoordinator(found or ""), transport)


# ---- status, in full


def verbose_lines(found: SwarmStatus) -> Iterator[str]:
    """Yield the full status for people: warnings, runs, peers, relays, offline contributors."""
    from swarm_ft.protocol.messages.enrolment import name_lookup

    name_of = name_lookup(found.names)
    yield from (f"warning: {one}" for one in found.warnings)
    for run in found.runs:
        yield from _run_lines(run, name_of)
    for member in found.members:
        yield from _member_lines(member, name_of)
    if not found.members:
        yield NO_PEERS
    for relay in found.relays:
        moved = format_traffic(relay.relayed_bytes)
        name = name_of(relay.name) if relay.name else "of the coordinator"
        named = f"relay {name} at {relay.endpoint}"
        yield f"{named}  {relay.links} links, {moved} so far"
    present = {member.peer_id for member in found.members}
    for one in found.contributors:
        if one.peer_id not in present:
            yield f"peer {name_of(one.peer_id)}  offline; gave {one.given}"


def _member_lines(member: MemberStatus, name_of: Callable[[str], str]) -> Iterator[str]:
    name = name_of(member.peer_id)
    key = "" if name == member.peer_id else f"  ({member.peer_id})"
    granted = f"  ({member.grant})" if str(member.grant) else ""
    idle = f"  idle: {member.idle}" if member.idle else ""
    yield f"peer {name}{key}  layers {member.layers or 'auto'}{granted}{idle}"
    machine = member.machine
    facts = [
        member.device,
        _memory_words(member),
        f"swarm-ft {member.version}" if member.version else "",
        f"at {member.endpoint}" if member.endpoint else "",
        f"last heartbeat {member.heard_ago_s:.0f} s ago" if member.heard_ago_s >= 1.0 else "",
    ]
    if any(facts):
        yield f"  {', '.join(filter(None, facts))}"
    for work in member.works:
        yield f"  {_work_words(work, name_of)}"
    links = [link_words(link, name_of(link.peer_id)) for link in member.links]
    if machine.up_bytes_per_s:
        up, down = (8e-6 * rate for rate in (machine.up_bytes_per_s, machine.down_bytes_per_s))
        trip = f"{1e3 * machine.round_trip_s:.0f} ms round trip"
        links.append(f"coordinator: {up:.0f} Mbps up, {down:.0f} down, {trip}")
    if links:
        yield f"  links: {', '.join(links)}"
    if member.given.steps:
        yield f"  gave {member.given}"


def _memory_words(member: MemberStatus) -> str:
    """Describe the lent memory, and whether the machine has less than its peers offer."""
    if member.offered_bytes <= member.memory_bytes:
        return f"{format_size(member.memory_bytes)} lent" if member.memory_bytes else ""
    of = f"{format_size(member.memory_bytes)} of {format_size(member.offered_bytes)}"
    return f"{of} lent (several peers share the machine's memory)"


def _work_words(work: MemberWork, name_of: Callable[[str], str]) -> str:
    does = work.doing.name.lower()
    if work.waits_for:
        does = f"waits for {', '.join(map(name_of, work.waits_for))}"
    replica = f", replica {work.replica + 1} of {work.num_replicas}"
    where = f"layers {work.layers}{replica if work.num_replicas > 1 else ''}"
    noun = "microbatch" if work.share == 1 else "microbatches"
    share = f"; {work.share} {noun} per step" if work.share else ""
    speed = f", {work.microbatch_s:.3g} s each" if work.share and work.microbatch_s else ""
    return f"{work.run_id}, {where}: {does}{share}{speed}"


def link_words(link: MemberLink, name: str) -> str:
    """Describe a member's link to another one: the way, and the measured speed."""
    way = f"{link.way} to " if link.way is not None else "to "
    measured = speed_words(link.speed)
    return f"{way}{name}{f' ({measured})' if measured else ''}"


def speed_words(speed: LinkSpeed) -> str:
    """Describe a link's measured speed: the rate to the other end, and the shortest round trip."""
    parts = []
    if speed.bytes_per_s:
        parts.append(f"{8e-6 * speed.bytes_per_s:.3g} Mbps")
    if speed.least_round_trip_s:
        parts.append(f"{1e3 * speed.least_round_trip_s:.3g} ms")
    return ", ".join(parts)


def _run_lines(run: RunSummary, name_of: Callable[[str], str]) -> Iterator[str]:
    from swarm_ft.client.formatting import kind_lines
    from swarm_ft.protocol.messages.control import stages_of

    counted = f"step {run.committed_steps}/{run.num_steps}"
    state = run.phase.in_words(waiting_words(run) or run.detail)
    own = "" if run.is_own else "  (another client's)"
    yield f"{run.run_id}  {counted}  {state}{own}"
    progress = "  ".join(progress_words(run))
    if progress:
        yield f"  {progress}"
    if run.snapshots:
        yield f"  snapshots of steps {', '.join(map(str, run.snapshots))}"
    for stage in stages_of(run.assignments):
        peers = ((name_of(peer), peer in run.joining) for peer in stage.peers)
        names = (f"{name} (joining)" if is_joining else name for name, is_joining in peers)
        yield f"  layers {stage.layers}  {', '.join(names)}"
    yield from (f"  {line}" for line in kind_lines(run.sent))
    yield from (f"  {line}" for boundary in run.boundaries for line in _about(boundary))


def waiting_words(run: RunSummary) -> str:
    """Describe the run's place in the queue; empty if it is not queued."""
    if run.behind is None:
        return ""
    return f"place {run.place}, after {run.behind}"


def progress_words(run: RunSummary) -> Iterator[str]:
    """Yield a run's loss, speed, remaining time and savings."""
    last, found = run.last_step, run.last_evaluation
    if last is not None:
        yield f"loss {last.loss:.3f}"
        yield f"lr {last.learning_rate:.3g}"
    if found is not None:
        yield f"evaluation {found.loss:.3f} (step {found.step})"
    if run.step_s and not run.phase.is_over:
        yield f"{run.step_s:.3g} s/step"
        yield f"{run.samples_per_s:.3g} samples/s"
    if run.tokens_per_s and not run.phase.is_over:
        yield f"{run.tokens_per_s:,.0f} tokens/s"
    if run.eta_s is not None:
        yield f"ETA {_eta_words(run)}"
    if run.bytes_saved > 0 and last is not None:
        yield f"saved {format_traffic(run.bytes_saved)}"
    if run.quality is not None:
        yield str(run.quality)


def _eta_words(run: RunSummary) -> str:
    """Return the remaining time of a run, as a range if there is one."""
    from swarm_ft.client.formatting import clock_time

    low, high = clock_time(run.eta_low_s), clock_time(run.eta_high_s)
    return (
        f"{low} to {high}" if run.eta_low_s is not None and low != high else clock_time(run.eta_s)
    )


def _about(status: BoundaryStatus) -> Iterator[str]:
    """Describe a boundary: its codecs with their ratio, and its buffers."""
    buffers = status.kept
    if status.ratio is not None:
        codecs = f"{status.forward_codec} down, {status.backward_codec} up"
        yield f"boundary {status.boundary:<11} {codecs}: {status.ratio:.1f} times fewer bytes"
    if status.hit_rate is not None and (status.delta_frames or buffers.samples):
        yield (
            f"boundary {status.boundary:<11} {status.buffered_samples} samples remembered, "
            f"buffer hit rate {status.hit_rate:.1%} ({status.key_frames} key, "
            f"{status.delta_frames} delta frames)"
        )
    if buffers.samples:
        yield (
            f"{'':<20} {format_size(buffers.memory_bytes)} in memory, "
            f"{format_size(buffers.disk_bytes)} on disk; "
            f"{buffers.memory_hits} reads from memory, {buffers.disk_hits} from disk, "
            f"{buffers.misses} misses; {buffers.evictions} evicted, {buffers.repairs} repaired"
        )


# ---- events


@click.command(
    short_help="Show the swarm's events, and their reasons.",
    epilog=examples(
        "swarm-ft events --invite @invitation.txt",
        "swarm-ft events --invite @invitation.txt --follow --json",
        "swarm-ft events --invite @invitation.txt --run run-1a2b3c4d --since 0",
    ),
)
@click.option("--follow", "follows", is_flag=True, help="Show new events too, until Ctrl-C.")
@click.option(
    "--since",
    type=click.IntRange(0),
    metavar="SERIAL",
    help="Serial number of the first event to show.  "
    f"[default: the newest {NEWEST_EVENTS}, or all of --run]",
)
@run_option
@look_options
@json_flag
def events(
    way: SwarmAddress, follows: bool, since: int | None, run_name: str | None, as_json: bool
) -> None:
    """Show the swarm's events, and their reasons."""
    from swarm_ft.cli.running import run_async, run_until_stopped
    from swarm_ft.ids import RunId

    async def work() -> None:
        run_id = RunId(run_name) if run_name else None
        async with connect_to_coordinator(way) as swarm:
            first = since if since is not None else await _newest(swarm, run_id)
            found = swarm.events(first, run_id=run_id, follows=follows, on_trouble=_warn)
            async with aclosing(found):
                async for event in found:
                    click.echo(json.dumps(event_fields(event)) if as_json else event_line(event))

    (run_until_stopped if follows else run_async)(work)


async def _newest(swarm: SwarmClient, run_id: RunId | None) -> int:
    if run_id is not None:
        return 0
    return max(0, (await swarm.status()).next_event - NEWEST_EVENTS)


def event_line(event: SwarmEvent) -> str:
    """Return the line of an event for people."""
    from swarm_ft.client.formatting import printable

    when = datetime.fromtimestamp(event.unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    text = event_words(event)
    return printable(f"{event.serial:>6}  {when}  {event.kind.label:<15} {text}").rstrip()


def event_words(event: SwarmEvent) -> str:
    """Return the text of an event, with its run."""
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
@click.option("--run", "run_name", metavar="ID", help="Id of the run.  [default: your newest run]")
@click.option(
    "--follow", "follows", is_flag=True, help="Show new steps too, until the run is over or Ctrl-C."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@look_options
@json_flag
def losses(
    way: SwarmAddress, run_name: str | None, follows: bool, as_csv: bool, as_json: bool
) -> None:
    """Show a run's steps (loss, learning rate, gradient norm, seconds) and its evaluations."""
    from swarm_ft.cli.running import run_async, run_until_stopped
    from swarm_ft.errors import BadOption

    if as_csv and as_json:
        raise BadOption("--csv, --json: expected one of the two, got both")

    async def work() -> None:
        async with connect_to_coordinator(way) as swarm:
            run = _chosen(await swarm.status(), run_name)
            if as_csv:
                click.echo(",".join(CSV_COLUMNS))
            async for row in loss_rows(swarm, run, follows=follows):
                for line in _loss_lines(row, as_json=as_json, as_csv=as_csv):
                    click.echo(line)

    (run_until_stopped if follows else run_async)(work)


def _chosen(found: SwarmStatus, name: str | None) -> RunSummary:
    """Return the caller's run of this name, or its newest one.

    Raises:
        NotFound: The caller has no such run.
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


async def loss_rows(
    swarm: SwarmClient, run: RunSummary, *, follows: bool
) -> AsyncGenerator[StepCommitted | Evaluated | Rollback, None]:
    """Yield all steps and evaluations until now, and with `follows` the coming ones too."""
    from swarm_ft.protocol.messages.client import RunStatus, StepCommitted
    from swarm_ft.protocol.messages.events import Rollback

    left = {("step", run.committed_steps - 1)} if run.committed_steps else set()
    if run.last_evaluation is not None:
        left.add(("evaluation", run.last_evaluation.step))
    num_statuses = 0
    async with aclosing(swarm.watch(run.run_id, _warn)) as watching:
        async for event in watching:
            if isinstance(event, RunStatus):
                num_statuses += 1  # The second status comes after all earlier events.
            elif isinstance(event, Rollback):
                yield event
            else:
                is_step = isinstance(event, StepCommitted)
                left.discard(("step" if is_step else "evaluation", event.step))
                yield event
            if not follows and (not left or num_statuses > 1):
                return


def _loss_lines(
    row: StepCommitted | Evaluated | Rollback, *, as_json: bool, as_csv: bool
) -> Iterator[str]:
    from swarm_ft.client.formatting import printable
    from swarm_ft.protocol.messages.events import Rollback

    if isinstance(row, Rollback):
        if as_json:
            yield json.dumps({"went_back": asdict(row)})
        else:
            click.echo(printable(row.words), err=as_csv)
        return
    fields = row_fields(row)
    if as_json:
        yield json.dumps(fields)
    elif as_csv:
        cells = (fields.get(name) for name in CSV_COLUMNS)
        yield ",".join("" if cell is None else str(cell) for cell in cells)
    else:
        yield _row_words(row)


def _row_words(row: StepCommitted | Evaluated) -> str:
    from swarm_ft.protocol.messages.client import StepCommitted

    if not isinstance(row, StepCommitted):
        return f"step {row.step:>6}  evaluation loss {row.loss:.4f}"
    return (
        f"step {row.step:>6}  loss {row.loss:<8.4f} lr {row.learning_rate:<10.3g} "
        f"grad norm {row.grad_norm:<9.3g} {row.seconds:.2f} s"
    )


def _warn(words: str) -> None:
    click.echo(f"swarm-ft: {words}", err=True)
