"""The table of who may call what, method by method and caller by caller, each as a real call.

What is expected is written down here, and not taken from the rules that are tested.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.proto import generation_pb2, link_pb2, meeting_pb2, run_pb2, snapshot_pb2
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from tests.hostile.attacker import (
    COORDINATOR,
    OK,
    PEER,
    SNAPSHOTS,
    Answer,
    Target,
    exchange,
)
from tests.hostile.callers import Kind
from tests.hostile.job import spec_message
from tests.hostile.scene import Broken, Scene


@dataclass(frozen=True, slots=True)
class Expected:
    """The required end of a call.

    Attributes:
        code: see `Answer`.
        words: that its message has.
    """

    code: str
    words: str = ""

    def check(self, answer: Answer) -> None:
        """Refuse any other end.

        Raises:
            Broken: it is another.
        """
        if answer.code != self.code or self.words not in answer.message:
            raise Broken(f"expected {self.code} {self.words!r}, got {answer}")


UNHEARD = Expected("UNAVAILABLE")
"""TLS ended it: not a byte of the call was read."""
BY_ROLE = Expected("not-allowed", "expected a call by a")
BY_REVOCATION = Expected("not-allowed", "its key was revoked")
ALLOWED = Expected(OK)
NOT_YOURS = Expected("not-found", "or not yours")

NO_MEMBER = dict.fromkeys((Kind.NOBODY, Kind.STRANGER, Kind.IMPOSTOR, Kind.EXPIRED), UNHEARD)
"""The same wherever they call."""
NEWCOMERS = (Kind.NEWCOMER, Kind.LATE_NEWCOMER)
CLIENTS = (Kind.CLIENT, Kind.OWNER)
PEERS = (Kind.OUTSIDER, Kind.INSIDER, Kind.NEIGHBOUR, Kind.REPLICA)

Row = dict[Kind, Expected]
Call = Callable[[Scene, Kind], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class MethodCells:
    """One method: how it is called, and what comes of it for each kind of caller."""

    method: str
    call: Call
    row: Row = field(default_factory=dict)


def _row(but: Row, others: Expected = BY_ROLE) -> Row:
    """Those named, and all others."""
    usual = dict.fromkeys(Kind, others) | NO_MEMBER | {Kind.REVOKED: BY_REVOCATION}
    return usual | but


def _all(kinds: tuple[Kind, ...], expected: Expected) -> Row:
    return dict.fromkeys(kinds, expected)


# ---- calls at the coordinator


async def _at_coordinator(scene: Scene, kind: Kind, method: str, *messages: object) -> Answer:
    caller = scene.callers[kind]
    coordinator, path = scene.victim.coordinator, COORDINATOR + method
    return await exchange(coordinator, path, caller, *messages, limit=1)  # type: ignore[arg-type]


async def _enrol(scene: Scene, kind: Kind) -> Answer:
    request = pb.EnrolRequest(protocol_version=PROTOCOL_VERSION)
    return await _at_coordinator(scene, kind, "Enrol", request)


async def _join(scene: Scene, kind: Kind) -> Answer:
    # No hello: a caller that may join gets that answer, and its other conversation goes on.
    return await _at_coordinator(scene, kind, "Join", pb.FromPeer(alive=pb.PeerAlive()))


async def _submit(scene: Scene, kind: Kind) -> Answer:
    """The job that runs already, under its name; a member could know both."""
    return await scene.submit(kind, scene.honest_client.job.spec, scene.honest_client.run_id)


async def _watch(scene: Scene, kind: Kind) -> Answer:
    request = pb.WatchRequest(run_id=scene.honest_client.run_id, protocol_version=PROTOCOL_VERSION)
    answer = await _at_coordinator(scene, kind, "Watch", request)
    for reply in answer.replies:
        pb.RunEvent.FromString(reply)
    return answer


async def _cancel(scene: Scene, kind: Kind) -> Answer:
    run_id = scene.spare_run if kind is Kind.OWNER else scene.honest_client.run_id
    request = pb.CancelRequest(run_id=run_id, protocol_version=PROTOCOL_VERSION)
    return await _at_coordinator(scene, kind, "Cancel", request)


async def _collected(scene: Scene, kind: Kind) -> Answer:
    run_id = scene.spare_run if kind is Kind.OWNER else scene.honest_client.run_id
    request = pb.CollectedRequest(run_id=run_id, protocol_version=PROTOCOL_VERSION)
    return await _at_coordinator(scene, kind, "Collected", request)


async def _status(scene: Scene, kind: Kind) -> Answer:
    request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
    answer = await _at_coordinator(scene, kind, "Status", request)
    for reply in answer.replies:
        check_details(scene, pb.SwarmStatus.FromString(reply), is_owner=kind is Kind.OWNER)
    return answer


async def _events(scene: Scene, kind: Kind) -> Answer:
    request = pb.EventsRequest(protocol_version=PROTOCOL_VERSION)
    answer = await _at_coordinator(scene, kind, "Events", request)
    for reply in answer.replies:
        for event in pb.SwarmEvents.FromString(reply).events:
            if event.run_id.startswith("run-") and event.words and kind is not Kind.OWNER:
                raise Broken(f"what happened in run {event.run_id} is told in words")
    return answer


async def _introduce(scene: Scene, kind: Kind) -> Answer:
    # Its endpoint comes first; it receives the relays, and nobody receives its name.
    reachable = meeting_pb2.Reachable(endpoints=["192.0.2.1:9"], protocol_version=PROTOCOL_VERSION)
    return await _at_coordinator(
        scene, kind, "Introduce", meeting_pb2.FromMember(reachable=reachable)
    )


async def _place(scene: Scene, kind: Kind) -> Answer:
    spec = spec_message(scene.honest_client.job.spec)
    request = pb.PlaceRequest(spec=spec, protocol_version=PROTOCOL_VERSION)
    return await _at_coordinator(scene, kind, "Place", request)


async def _measure_link(scene: Scene, kind: Kind) -> Answer:
    sample = pb.LinkSample(protocol_version=PROTOCOL_VERSION)
    return await _at_coordinator(scene, kind, "MeasureLink", sample)


async def _relay(scene: Scene, kind: Kind) -> Answer:
    # It announces an endpoint; nobody is sent there, since it sends no more.
    hello = meeting_pb2.RelayHello(
        endpoint="127.0.0.1:9", probe_endpoint="127.0.0.1:9", protocol_version=PROTOCOL_VERSION
    )
    return await _at_coordinator(scene, kind, "Relay", meeting_pb2.FromRelay(hello=hello))


def check_details(scene: Scene, found: pb.SwarmStatus, *, is_owner: bool) -> None:
    """Check that only the honest client reads its runs in full; nobody else has one.

    Raises:
        Broken: not so.
    """
    shown = found.SerializeToString()
    if not is_owner and scene.honest_client.job.spec.model.reference.encode() in shown:
        raise Broken("the path of the owner's model is shown")
    if not found.runs:
        raise Broken("no run is shown at all")
    for run in found.runs:
        is_detailed = run.is_own or any(run.spec_digest) or any(s.endpoint for s in run.assignments)
        if run.run_id.startswith("run-") and is_detailed != is_owner:
            raise Broken(f"run {run.run_id}: {'details' if is_detailed else 'no details'} are told")


# ---- calls at a peer


def _callee(scene: Scene, kind: Kind) -> Target:
    """The middle stage's second replica; to a peer that is no neighbour, the last stage."""
    return scene.victim.peers[3 if kind is Kind.INSIDER else 2].target


async def _link(scene: Scene, kind: Kind) -> Answer:
    caller, callee = scene.callers[kind], _callee(scene, kind)
    hello = link_pb2.LinkHello(
        peer_id=caller.name if caller else "somebody",
        to=callee.name,
        run_id="run",
        protocol_version=PROTOCOL_VERSION,
    )
    return await exchange(callee, PEER + "Link", caller, link_pb2.LinkMessage(hello=hello), limit=1)


async def _generate(scene: Scene, kind: Kind) -> Answer:
    async with scene.honest_client.finished() as status:
        begin = generation_pb2.BeginText(
            name=result_name(status.run_id, status.committed_steps),
            max_tokens=1,
            protocol_version=PROTOCOL_VERSION,
        )
        one = generation_pb2.TextActivation(
            values=bytes(4 * scene.honest_client.job.spec.model.hidden_size)
        )
        messages = (
            generation_pb2.ToStage(begin_text=begin),
            generation_pb2.ToStage(text_activation=one),
        )
        return await exchange(
            _middle(scene), PEER + "Generate", scene.callers[kind], *messages, limit=1
        )


async def _list_chunks(scene: Scene, kind: Kind) -> Answer:
    async with scene.honest_client.finished() as status:
        caller, name = scene.callers[kind], result_name(status.run_id, status.committed_steps)
        return await exchange(_middle(scene), SNAPSHOTS + "ListChunks", caller, name)


async def _fetch_chunks(scene: Scene, kind: Kind) -> Answer:
    async with scene.honest_client.finished() as status:
        name = result_name(status.run_id, status.committed_steps)
        request = snapshot_pb2.FetchRequest(name=name, first_chunk=0, num_chunks=1)
        return await exchange(
            _middle(scene), SNAPSHOTS + "FetchChunks", scene.callers[kind], request
        )


def _middle(scene: Scene) -> Target:
    return scene.victim.peers[2].target


def result_name(run_id: str, step: int) -> snapshot_pb2.ShardName:
    """The middle stage's part of a result."""
    layers = run_pb2.LayerRange(start=2, stop=4)
    return snapshot_pb2.ShardName(run_id=run_id, step=step, layers=layers, is_result=True)


NOT_FOR_YOU = Expected("not-allowed", "it is not for")
OF_THE_FILE = _row(
    _all(NEWCOMERS, UNHEARD)  # peers know no invitations
    | _all(PEERS, NOT_FOR_YOU)
    | {Kind.CLIENT: NOT_FOR_YOU, Kind.OWNER: ALLOWED}
)
OF_THE_TEXT = _row(_all(NEWCOMERS, UNHEARD) | {Kind.CLIENT: NOT_FOR_YOU, Kind.OWNER: ALLOWED})
OF_A_RUN = _row({Kind.CLIENT: NOT_YOURS, Kind.OWNER: ALLOWED})

TABLE = (
    MethodCells(
        "Enrol",
        _enrol,
        _row(
            _all((Kind.NEWCOMER, Kind.RELAY, *CLIENTS, *PEERS), ALLOWED)
            | {Kind.LATE_NEWCOMER: Expected("bad-invite", "used up")}
        ),
    ),
    MethodCells("Join", _join, _row(_all(PEERS, Expected("out-of-turn", "expected a hello")))),
    MethodCells(
        "Submit",
        _submit,
        _row({Kind.CLIENT: Expected("run-mismatch", "exists already"), Kind.OWNER: ALLOWED}),
    ),
    MethodCells("Watch", _watch, OF_A_RUN),
    MethodCells("Cancel", _cancel, OF_A_RUN),
    MethodCells("Collected", _collected, OF_A_RUN),
    MethodCells("Status", _status, _row(_all((*CLIENTS, *PEERS), ALLOWED))),
    MethodCells("Events", _events, _row(_all((*CLIENTS, *PEERS), ALLOWED))),
    MethodCells("Introduce", _introduce, _row(_all((*CLIENTS, *PEERS), ALLOWED))),
    MethodCells("Place", _place, _row(_all(CLIENTS, ALLOWED))),
    MethodCells("MeasureLink", _measure_link, _row(_all((*NEWCOMERS, *PEERS), ALLOWED))),
    MethodCells("Relay", _relay, _row({Kind.RELAY: ALLOWED})),
    MethodCells("Link", _link, _row(_all(NEWCOMERS, UNHEARD) | _all(PEERS, ALLOWED))),
    MethodCells("Generate", _generate, OF_THE_TEXT),
    MethodCells("ListChunks", _list_chunks, OF_THE_FILE),
    MethodCells("FetchChunks", _fetch_chunks, OF_THE_FILE),
)


def names() -> Iterator[str]:
    """Yield the names of all cells of the table, `METHOD:CALLER`."""
    for cells in TABLE:
        for kind in Kind:
            yield f"{cells.method}:{kind}"


async def attack(scene: Scene, name: str) -> None:
    """Make the call of a cell, and see how it ends.

    Raises:
        Broken: not as it has to.
    """
    method, _, kind = name.partition(":")
    cells = next(cells for cells in TABLE if cells.method == method)
    cells.row[Kind(kind)].check(await cells.call(scene, Kind(kind)))
