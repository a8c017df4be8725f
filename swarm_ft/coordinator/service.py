"""The coordinator's shell: streams become events, effects become messages. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from swarm_ft.base import failpoints
from swarm_ft.base.clock import Clock
from swarm_ft.base.log import get_logger
from swarm_ft.build import described_version
from swarm_ft.coordinator.capacity import Capacity, check_lent
from swarm_ft.coordinator.decide.faults import run_at_fault, run_of
from swarm_ft.coordinator.decide.machine import decide
from swarm_ft.coordinator.disk_watch import DiskWatch
from swarm_ft.coordinator.event_log import EventLog
from swarm_ft.coordinator.facts.connectivity import Connectivity
from swarm_ft.coordinator.facts.events import (
    CodecsChanged,
    CommitRecord,
    Dismiss,
    Effect,
    EmitEvent,
    Event,
    EventRecord,
    PeerJoined,
    PeerLost,
    PeerSaid,
    Publish,
    RateChanged,
    Record,
    ResultCollected,
    RunAborted,
    RunCancelled,
    RunPaused,
    RunRecord,
    RunResumed,
    RunSubmitted,
    SendMessage,
    SnapshotLost,
    SnapshotWritten,
    Tick,
    TokensLost,
    WriteSnapshot,
)
from swarm_ft.coordinator.facts.quotas import Quotas
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import QUEUE_S, RESULT_S, Run, SwarmState
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.tokens import RESERVE_BYTES
from swarm_ft.coordinator.member_names import NO_NAMES, MemberNames
from swarm_ft.coordinator.places import Places
from swarm_ft.coordinator.plan.shared_memory import site_of
from swarm_ft.coordinator.reason_texts import as_text
from swarm_ft.coordinator.recording.recorder import Recorder, Sink, Surroundings
from swarm_ft.coordinator.relays import RelayRegistry
from swarm_ft.coordinator.submission import Submissions
from swarm_ft.coordinator.watching import (
    FIRST_PAGE,
    StatusFrames,
    Watcher,
    Watchers,
    event_message,
    event_of,
    message_to_peer,
    overview,
    status_of,
    with_names,
)
from swarm_ft.errors import (
    BadInput,
    BadOption,
    JournalError,
    MalformedMessage,
    NotAllowed,
    NotFound,
    OutOfTurn,
    SwarmError,
    Unavailable,
)
from swarm_ft.identity.roles import Caller
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.machines.rate import Rate
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import (
    MAX_CODEC_CHANGES,
    CancelRequest,
    CollectedRequest,
    Evaluated,
    RunEvent,
    RunPhase,
    RunStatus,
    StatusRequest,
    StepCommitted,
    SubmitPart,
    SwarmStatus,
    WatchRequest,
)
from swarm_ft.protocol.messages.contribution import ContributionReport, ContributionRequest
from swarm_ft.protocol.messages.control import (
    MAX_REVOKED,
    ClockProbe,
    ClockReply,
    CommitStep,
    FromPeer,
    MemoryShare,
    PeerHello,
    PlanStep,
    Renewed,
    Revoked,
    ToPeer,
)
from swarm_ft.protocol.messages.events import (
    Actor,
    EventKind,
    EventsRequest,
    SwarmEvent,
    SwarmEvents,
)
from swarm_ft.protocol.messages.timeline import PeerTimeline, StepTimeline
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.priority import Claim
from swarm_ft.protocol.spec.run_spec import Codecs
from swarm_ft.protocol.spec.sample_rows import Counts, counts_of_all
from swarm_ft.protocol.spec.sizes import format_size
from swarm_ft.snapshots.store import Manifest, SnapshotStore
from swarm_ft.transport.admission import address_of
from swarm_ft.transport.base import Handler, MessageStream, Method, until_one_ends
from swarm_ft.transport.methods import (
    CANCEL,
    COLLECTED,
    EVENTS,
    JOIN,
    MEASURE_LINK,
    PLACE,
    STATUS,
    SUBMIT,
    WATCH,
    Encoded,
)
from swarm_ft.transport.rules import check_name, is_owner, may_read

logger = get_logger(__name__)

TICK_S = 0.25
"""Seconds between two events about the passage of time."""
MAX_LEARNING_RATE = 1e3
MAX_RATE_CHANGES = 256
"""Limits of an operator's changes of a run's learning rate."""
READY_S = 5.0
"""Seconds without an event after which the coordinator is not ready."""
MAX_QUEUED_TO_PEER = 256
"""Messages that may pile up before a peer is dropped; it may join again."""

MAX_LISTED = 10
"""Most runs that an error message lists."""
STEPS_AT_ONCE = 256
"""Steps read from the journal at a time for a watcher: a run may have millions, and others wait."""

JOINS_PER_S = 4.0
"""Joins per second of one address and of one peer; each costs a decision over all runs."""
ADDRESS_BURST, PEER_BURST = 128, 8
"""Joins at once: of one address, whose peers return together after a restart, and of one peer."""
MAX_FOLLOWERS, MAX_OWN_FOLLOWERS = 64, 8
"""Calls that follow events: of all members, and of one. The operator's page takes none."""
MAX_ENCODED_PAGES = 128
"""Pages of events that are cached as bytes: all of the journal, with and without texts."""
DEFAULT_QUOTAS = Quotas()
BUG = "a bug; the coordinator's log has the details"

PeerStream = MessageStream[ToPeer, FromPeer]
WatchStream = MessageStream[RunEvent | PeerTimeline, WatchRequest]
EventsStream = MessageStream[SwarmEvents | Encoded, EventsRequest]


class _Outbox:
    """Messages to one peer, in order; its stream ends when `write` or `dropped` does.

    Args:
        load: Function that returns the message to send, with a plan's tokens; None if it is
            obsolete.
        on_unsendable: Callback with a message that cannot be encoded, or is too long.
    """

    def __init__(
        self,
        load: Callable[[SendMessage], Awaitable[ToPeer | None]],
        on_unsendable: Callable[[SendMessage, Exception], None],
    ) -> None:
        self._load = load
        self._on_unsendable = on_unsendable
        self._queue: asyncio.Queue[SendMessage | SwarmError] = asyncio.Queue(MAX_QUEUED_TO_PEER)
        self._dropped: asyncio.Future[SwarmError] = asyncio.get_running_loop().create_future()

    def put(self, item: SendMessage | SwarmError) -> None:
        """Queue a message; an error ends the stream after all messages before it."""
        if self._queue.full():
            self.drop(Unavailable("this peer does not read the coordinator's messages"))
        else:
            self._queue.put_nowait(item)

    def drop(self, reason: SwarmError) -> None:
        """End the stream now, even if the peer reads nothing."""
        if not self._dropped.done():
            self._dropped.set_result(reason)

    async def write(self, stream: PeerStream) -> None:
        """Send queued messages until cancelled; raise a queued error."""
        while True:
            item = await self._queue.get()
            if isinstance(item, SwarmError):
                raise item
            message = await self._load(item)
            if message is not None:
                try:
                    await stream.send(message)
                except (MalformedMessage, ValueError, TypeError) as error:  # it was not sent
                    self._on_unsendable(item, error)
            if isinstance(message, CommitStep):
                failpoints.reached("commit-said")

    async def dropped(self) -> None:
        """Raise the reason of `drop` once there is one."""
        raise await self._dropped


class CoordinatorService:
    """The coordinator's state, its journal and all streams.

    A failing journal ends `run`: no message may be sent about a change that is not durable.

    Args:
        journal: Database of everything that a restart needs.
        clock: Clock of the coordinator.
        snapshots: Common directory for stages of snapshots; None: peers keep them, or nobody does.
        num_keepers: Number of peers that keep each stage of a snapshot, without a common place;
            0: none.
        moves_layers: Whether runs are repartitioned for speed while they train.
        queue_s: Seconds that a run waits for peers that can host it.
        result_s: Seconds that a finished run waits for its client.
        quotas: Limits on clients' jobs.
        grants: Function that returns a member's permissions by its name, called in a thread;
            None: all members may host anything. It may raise an error for the member.
        claims: Function that returns a client's claim on peers by its name, called in a thread;
            None: clients have no keys.
        ways: Function that returns the known connectivity of members.
        relays: Connected relays; they receive revocations.
        unix_s: Wall clock, for the times of events.
        names: Names of members for people.
        recording: Sink for all inputs of decisions; None: there is no recording.
    """

    def __init__(  # noqa: PLR0913 - what a process has to give
        self,
        journal: Journal,
        clock: Clock,
        snapshots: SnapshotStore | None = None,
        *,
        num_keepers: int = 0,
        moves_layers: bool = True,
        queue_s: float = QUEUE_S,
        result_s: float = RESULT_S,
        quotas: Quotas = DEFAULT_QUOTAS,
        grants: Callable[[PeerId], Grant] | None = None,
        claims: Callable[[str], Claim] | None = None,
        ways: Callable[[], Connectivity] = Connectivity,
        relays: RelayRegistry | None = None,
        unix_s: Callable[[], float] = time.time,
        recording: Sink | None = None,
        names: MemberNames = NO_NAMES,
    ) -> None:
        self._names = names
        self._clock = clock
        self._unix_s = unix_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = False
        # What decisions are written to.
        self._journal = journal
        self._journal_failure = asyncio.get_running_loop().create_future()
        self._event_log = EventLog(journal, unix_s)
        self._recorder = Recorder(recording, self._surroundings()) if recording else None
        self._snapshots = snapshots
        self._disk = DiskWatch(journal.tokens.free_bytes, RESERVE_BYTES)
        # Peers and relays.
        self._grants = grants
        self._ways = ways
        self._relays = relays
        self._revoked = Revoked(names=())
        self._capacity = Capacity(clock, lambda: self._state, names)
        self._joins_of_address: Rate[str] = Rate(per_s=JOINS_PER_S, burst=ADDRESS_BURST)
        self._joins_of_peer: Rate[PeerId] = Rate(per_s=JOINS_PER_S, burst=PEER_BURST)
        self._outboxes: dict[PeerId, _Outbox] = {}
        self._counted: tuple[object, asyncio.Task[Counts]] | None = None  # of one plan
        # Clients, and all others that watch.
        self._submissions = Submissions(
            journal,
            known=lambda run_id: self._state.runs.get(run_id),
            begin=self._begin_run,
            quotas=quotas,
            runs=lambda: self._state.runs.values(),
            keeps_snapshots=snapshots is not None or num_keepers > 0,
            claims=claims,
        )
        self._watchers = Watchers()
        self._logged_phases: dict[RunId, str] = {}
        self._frames = StatusFrames(self._encoded_status, lambda: self._state)
        self._followers = Places(MAX_FOLLOWERS, MAX_OWN_FOLLOWERS, "followers")
        # All readers of a page share its bytes.
        self._encoded_page = lru_cache(MAX_ENCODED_PAGES)(_encoded_page)
        # Members whose calls are open, and those that called since `take_callers`.
        self._open_calls: Counter[str] = Counter()
        self._callers: set[str] = set()
        runs = {run.run_id: run for run in journal.load(clock.now_s())}
        self._state: SwarmState = SwarmState(
            runs=MappingProxyType(runs),
            standings=MappingProxyType(journal.standings(clock.now_s())),
            contributions=MappingProxyType(journal.contributions()),
            sent_traffic=MappingProxyType(journal.sent_traffic()),
            queue_s=queue_s,
            result_s=result_s,
            keeps_snapshots=snapshots is not None or num_keepers > 0,
            num_keepers=0 if snapshots is not None else num_keepers,
            moves_layers=moves_layers,
        )
        for run in runs.values():
            if not run.phase.is_over:
                logger.info("run %s: continues at step %d", run.run_id, run.committed_steps)

    def handlers(self) -> Mapping[Method[Any, Any], Handler]:
        """Return the handlers for `Transport.serve`."""
        answers: dict[Method[Any, Any], Handler] = {
            JOIN: self._join,
            SUBMIT: self._submit,
            WATCH: self._watch,
            CANCEL: partial(self._end, RunCancelled),
            COLLECTED: partial(self._end, ResultCollected),
            STATUS: self._status,
            EVENTS: self._events,
            PLACE: self._capacity.place,
            MEASURE_LINK: self._capacity.measure,
        }
        return {method: self._with_noted_caller(answer) for method, answer in answers.items()}

    def _with_noted_caller(self, answer: Handler) -> Handler:
        """Return the handler, extended to record its callers for `take_callers`."""

        async def noting(stream: MessageStream[Any, Any]) -> None:
            name = _member(stream.caller)
            self._open_calls[name] += 1
            try:
                await answer(stream)
            finally:
                self._open_calls -= Counter((name,))
                self._callers.add(name)

        return noting

    def take_callers(self) -> frozenset[str]:
        """Return the names of members that have called since the last time, or still do."""
        callers, self._callers = self._callers, set()
        return frozenset((callers | self._open_calls.keys()) - {""})

    async def run(self) -> None:
        """Process the passage of time until cancelled.

        Raises:
            JournalError: The journal cannot be written.
        """
        self._start(self._forget_snapshots())
        started = Reason(kind=ReasonKind.COORDINATOR_STARTED, code=described_version())
        start = EmitEvent(kind=EventKind.COORDINATOR_STARTED, reason=started)
        self._event_log.notify_written(self._write([], [start]))
        self._check_disk()
        try:
            while True:
                await asyncio.wait([self._journal_failure], timeout=TICK_S)
                self._handle(Tick(self._ways()))
                self._capacity.measure_steps()
                self._check_disk()
        finally:
            self._is_ending = True
            if self._recorder is not None:
                self._recorder.close()

    def _check_disk(self) -> None:
        """Emit an event when the disk becomes nearly full, and when it has room again."""
        happened = self._disk.look(self._clock.now_s())
        if happened is None:
            return
        logger.warning("%s", as_text(happened.reason))
        with contextlib.suppress(JournalError):  # the event needs room on the full disk
            self._event_log.notify_written(self._write([], [happened]))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that the operator should solve, as text."""
        return () if self._disk.low is None else (as_text(self._disk.low),)

    # ---- events in, effects out

    def _handle(self, event: Event) -> None:
        """Decide about an event, write the decision to the journal, and perform its effects.

        A bug in a decision fails the run that it concerns, if one does; the others continue.

        Raises:
            JournalError: The journal cannot be written, now or before; `run` raises the same.
        """
        if self._journal_failure.done():
            self._journal_failure.result()  # raises
        before, now_s = self._state, self._clock.now_s()
        try:
            after, effects = decide(before, event, now_s)
        except Exception as error:
            is_abort = isinstance(event, RunAborted)
            run_id = None if is_abort else run_at_fault(before, event, now_s)
            if run_id is None:
                raise
            self._abort_and_retry(run_id, error, event)
            return
        try:
            is_adopted = self._adopt(event, after, effects)
        except SwarmError as error:
            if not self._journal_failure.done():
                self._journal_failure.set_exception(error)
            raise
        if is_adopted:
            self._perform_all(effects)

    def _adopt(self, event: Event, after: SwarmState, effects: list[Effect]) -> bool:
        """Make a decision durable and adopt its state.

        Returns:
            Whether it was adopted. Otherwise a bug in a record failed the run of that record, and
            the event was handled again.

        Raises:
            JournalError: The journal cannot be written at all.
        """
        records = [effect for effect in effects if isinstance(effect, Record)]
        try:
            emitted = [effect for effect in effects if isinstance(effect, EmitEvent)]
            events = self._write(records, emitted)
        except SwarmError:
            raise
        except Exception as error:
            run_ids = {run_of(effect) for effect in effects if run_of(effect) is not None}
            (run_id,) = run_ids if len(run_ids) == 1 else (None,)
            if run_id is None or isinstance(event, RunAborted):
                raise JournalError(f"a decision cannot be written: {error!r:.200}") from error
            self._abort_and_retry(run_id, error, event)
            return False
        before, self._state = self._state, after
        if self._recorder is not None and not self._is_ending:
            # The recorder reads the number of the next event, as it was before this decision.
            self._recorder.record_decision(before, event, after, effects)
        self._event_log.notify_written(events)
        if any(isinstance(record, CommitRecord) for record in records):
            failpoints.reached("commit-written")
        return True

    def _perform_all(self, effects: list[Effect]) -> None:
        failed: dict[RunId, Exception] = {}
        for effect in effects:
            try:
                self._perform(effect)
            except Exception as error:
                run_id = run_of(effect)
                if run_id is None:
                    raise
                failed.setdefault(run_id, error)
        for failed_run, cause in failed.items():
            self._abort(failed_run, cause)

    def _abort_and_retry(self, run_id: RunId, error: Exception, event: Event) -> None:
        """Fail a run; then decide again about an event that concerns more than this run.

        Raises:
            Exception: `error`, if the run is over already, so that failing it would change nothing.
        """
        if not self._is_under_way(run_id):
            raise error
        self._abort(run_id, error)
        if run_id != run_of(event):
            self._handle(event)

    def _abort(self, run_id: RunId, error: Exception) -> None:
        """Fail a run after a bug, so that all others go on. The log gets the traceback, once."""
        logger.error("run %s: a bug in the coordinator; the run fails", run_id, exc_info=error)
        if self._is_under_way(run_id):
            self._handle(RunAborted(run_id, f"the coordinator failed on this run: {BUG}"))

    def _is_under_way(self, run_id: RunId) -> bool:
        run = self._state.runs.get(run_id)
        return run is not None and run.phase <= RunPhase.FINISHED

    def _on_unsendable(self, say: SendMessage, error: Exception) -> None:
        run_id = run_of(say)
        if run_id is None:
            raise error
        with contextlib.suppress(SwarmError):  # a failing journal ends `run`, which reports it
            self._abort(run_id, error)

    def _write(self, records: list[Record], emitted: list[EmitEvent]) -> list[EventRecord]:
        """Write records and numbered events to the journal; return these events."""
        # A coordinator that ends loses its peers, which is no event about them.
        events = self._event_log.number([] if self._is_ending else emitted)
        self._journal.write([*records, *events])
        return events

    def _log_phase(self, run: Run) -> None:
        """Log a run's phase, unless that is what was logged last."""
        words = run.phase.in_words(self._names.in_text(as_text(run.reason)))
        if self._logged_phases.get(run.run_id) != words:
            logger.info("run %s: %s", run.run_id, words)
        self._logged_phases[run.run_id] = words
        if run.phase > RunPhase.FINISHED:
            del self._logged_phases[run.run_id]

    def _log_share(self, peer_id: PeerId, share: MemoryShare) -> None:
        logger.info(
            "peer %s: placements count %s of its memory; peers on its machine: %d",
            *(self._names.shown(peer_id), format_size(share.memory_bytes), share.num_peers),
        )

    def _perform(self, effect: Effect) -> None:
        """Perform an effect; of the records, which are written already, only the end of a run."""
        match effect:
            case SendMessage(peer_id, MemoryShare() as share):
                self._log_share(peer_id, share)
                self._put(peer_id, effect)
            case SendMessage(peer_id, PlanStep() as plan):
                traced = self._watchers.is_traced(plan.run_id)
                self._put(peer_id, replace(effect, message=replace(plan, traced=traced)))
            case SendMessage(peer_id):
                self._put(peer_id, effect)
            case Dismiss(peer_id, error, reason):
                refusal = error(self._names.in_text(as_text(reason)))
                shown = self._names.shown(peer_id)
                logger.warning("peer %s is dismissed: %s", shown, refusal.message)
                self._put(peer_id, refusal)
            case Publish(run_id, published):
                if isinstance(published, Run):
                    self._log_phase(published)
                self._watchers.publish(run_id, event_of(run_id, published, self._names))
            case WriteSnapshot():
                self._start(self._write_snapshot(effect))
            case RunRecord(run) if run.phase > RunPhase.FINISHED:
                self._start(asyncio.to_thread(self._journal.tokens.delete, run.run_id))
                self._start(self._forget_snapshots())

    def _surroundings(self) -> Surroundings:
        """Return the sources of all inputs that the recorder reads beside decisions."""
        return Surroundings(
            machines=lambda: self._capacity.machines,
            relays=lambda: self._relays.statuses if self._relays is not None else (),
            next_event=lambda: self._event_log.next_serial,
            unix_s=self._unix_s,
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_snapshot(self, effect: WriteSnapshot) -> None:
        """Complete a snapshot whose stages are saved, and remove those that it replaces."""
        run_id, snapshot = effect.run_id, effect.snapshot
        failpoints.reached_meanwhile("snapshot-saved")
        try:
            await self._write_manifest(effect)
        except Exception as error:
            is_bug = not isinstance(error, SwarmError)
            text = error.message if isinstance(error, SwarmError) else BUG
            logger.warning(
                "run %s: the snapshot of step %d failed: %s",
                run_id,
                snapshot.step,
                text,
                exc_info=error if is_bug else None,
            )
            with contextlib.suppress(SwarmError):
                self._handle(SnapshotLost(run_id, snapshot, text))
            return
        logger.info("run %s: the snapshot of step %d is complete", run_id, snapshot.step)
        with contextlib.suppress(SwarmError):  # a failing journal ends `run`, which reports it
            self._handle(SnapshotWritten(run_id, snapshot))
            await self._prune_snapshots(run_id)

    async def _write_manifest(self, effect: WriteSnapshot) -> None:
        if self._snapshots is None:
            raise Unavailable("this coordinator keeps no snapshots; start it with --snapshots")
        snapshot = effect.snapshot
        manifest = Manifest.of_run(effect.run_id, effect.spec, snapshot.step, snapshot.stages)
        await asyncio.to_thread(self._snapshots.commit, manifest)

    async def _prune_snapshots(self, run_id: RunId) -> None:
        """Remove snapshots that the run no longer needs."""
        run = self._state.runs.get(run_id)
        if self._snapshots is None or run is None or run.phase > RunPhase.FINISHED:
            return
        steps = [snapshot.step for snapshot in run.past.snapshots]
        try:
            await asyncio.to_thread(self._snapshots.prune, run_id, steps)
        except SwarmError as error:
            logger.warning("run %s: old snapshots cannot be removed: %s", run_id, error.message)

    async def _forget_snapshots(self) -> None:
        """Remove snapshots of runs that are over, including stages that peers wrote late.

        Those of a run that cannot be read stay: a later version may read it.
        """
        runs = self._state.runs.values()
        over = [run.run_id for run in runs if run.phase > RunPhase.FINISHED and _is_readable(run)]
        if self._snapshots is None or not over:
            return
        try:
            await asyncio.to_thread(self._snapshots.forget, over)
        except SwarmError as error:
            logger.warning("snapshots of ended runs cannot be removed: %s", error.message)

    async def _with_tokens(self, say: SendMessage) -> ToPeer | None:
        """Return the message, with the tokens that a plan needs; None if they cannot be read."""
        message = message_to_peer(say.message, self._names)
        if not isinstance(message, PlanStep):
            return message
        run = self._state.runs.get(message.run_id)
        if run is None:
            return None
        read = self._journal.tokens.read
        try:
            counts = await self._counts_of(run, message)
            tokens = await asyncio.to_thread(read, run.run_id, run.spec, say.tokens_of)
        except (JournalError, NotFound) as error:
            self._handle(TokensLost(run.run_id, error.message))
            return None
        except Exception as error:  # noqa: BLE001 - it is logged, and fails the run
            self._abort(run.run_id, error)
            return None
        packed = zip(message.samples, counts.documents, strict=False)
        return replace(
            message,
            tokens=tokens,
            num_targets=counts.num_targets,
            lengths=counts.lengths,
            documents={sample: lengths for sample, lengths in packed if lengths},
        )

    async def _counts_of(self, run: Run, plan: PlanStep) -> Counts:
        """Count all samples of a plan, once for all of its peers."""
        samples = run.run_id, plan.samples
        if self._counted is None or self._counted[0] != samples:
            counting = asyncio.to_thread(self._count, run, plan)
            self._counted = samples, asyncio.create_task(counting)
        _, count = self._counted
        return await asyncio.shield(count)

    def _count(self, run: Run, plan: PlanStep) -> Counts:
        """Count the targets of the samples that train, and the tokens of all."""
        trained, held_out = (
            self._journal.tokens.count(
                run.run_id, run.spec, [sample for batch in batches for sample in batch.samples]
            )
            for batches in (plan.microbatches, plan.evaluation)
        )
        return counts_of_all((trained, held_out))._replace(num_targets=trained.num_targets)

    def _put(self, peer_id: PeerId, item: SendMessage | SwarmError) -> None:
        outbox = self._outboxes.get(peer_id)
        if outbox is not None:  # else `PeerLost` follows
            outbox.put(item)

    # ---- peers

    def revoke(self, names: frozenset[str]) -> None:
        """Dismiss these members, and send the revocation to all others."""
        self._revoked = Revoked(names=tuple(sorted(names)[:MAX_REVOKED]))
        if self._relays is not None:
            self._relays.revoke(names)
        for peer_id, outbox in self._outboxes.items():
            if peer_id in names:
                outbox.drop(NotAllowed(f"peer {peer_id}: its key was revoked"))
            else:
                self._put(peer_id, SendMessage(peer_id, self._revoked))

    def renewed(self, name: str, until_unix_s: float) -> None:
        """Send a member's renewed expiry to all peers, so that they keep its calls open."""
        for peer_id in self._outboxes:
            self._put(peer_id, SendMessage(peer_id, Renewed(name=name, until_unix_s=until_unix_s)))

    def dismiss_all_peers(self, reason: str) -> None:
        """Dismiss all peers."""
        for outbox in self._outboxes.values():
            outbox.drop(NotAllowed(reason))

    async def _join(self, stream: PeerStream) -> None:
        now_s, host = self._clock.now_s(), stream.remote.rpartition(":")[0]
        self._joins_of_address.check(address_of(host), now_s, f"peers at {host} join")
        hello = await stream.receive()
        if not isinstance(hello, PeerHello):
            raise OutOfTurn(f"{stream.remote}: expected a hello as the first message")
        check_name(stream.caller, hello.peer_id)
        check_lent(hello)
        self._joins_of_peer.check(hello.peer_id, now_s, f"peer {hello.peer_id} joins")
        outbox = self._open_outbox(hello.peer_id)
        if self._revoked.names:
            outbox.put(SendMessage(hello.peer_id, self._revoked))
        try:
            grant = await self._grant(hello.peer_id)
            offer = f"layers {hello.layers or 'auto'}", str(grant) or "no limits"
            shown = self._names.shown(hello.peer_id)
            logger.info("peer %s joined from %s: %s (%s)", shown, stream.remote, *offer)
            site = site_of(hello, address_of(host))
            self._handle(PeerJoined(replace(hello, machine_key=""), grant, site))
            reading = self._read(stream, hello.peer_id)
            await until_one_ends(outbox.write(stream), outbox.dropped(), reading)
        finally:
            if self._outboxes.get(hello.peer_id) is outbox:
                del self._outboxes[hello.peer_id]
                self._capacity.forget_peer(hello.peer_id)
                logger.info("peer %s disconnected", self._names.shown(hello.peer_id))
                self._handle(PeerLost(hello.peer_id))

    async def _grant(self, peer_id: PeerId) -> Grant:
        return await asyncio.to_thread(self._grants, peer_id) if self._grants else Grant()

    def _open_outbox(self, peer_id: PeerId) -> _Outbox:
        """Return the outbox of a peer's new stream, which replaces an older one."""
        older, outbox = self._outboxes.get(peer_id), _Outbox(self._with_tokens, self._on_unsendable)
        if older is not None:
            older.drop(OutOfTurn(f"peer {peer_id} joined again elsewhere"))
        self._outboxes[peer_id] = outbox
        return outbox

    async def _read(self, stream: PeerStream, peer_id: PeerId) -> None:
        while (message := await stream.receive()) is not None:
            match message:
                case PeerHello():
                    raise OutOfTurn(f"peer {peer_id}: expected one hello, got a second one")
                case ClockProbe(sent_us):
                    reply = ClockReply(sent_us, round(1e6 * self._clock.now_s()))
                    self._put(peer_id, SendMessage(peer_id, reply))
                case ContributionRequest():
                    self._handle(PeerSaid(peer_id, message))
                    contribution = self._state.contribution_of(peer_id)
                    self._put(peer_id, SendMessage(peer_id, ContributionReport(given=contribution)))
                case StepTimeline():
                    self._trace(peer_id, message)
                case Machine():
                    is_new = self._capacity.on_machine_report(peer_id, message)
                    if self._recorder is not None and is_new:
                        self._recorder.record_machine(peer_id, message)
                case _:
                    self._handle(PeerSaid(peer_id, message))

    def _trace(self, peer_id: PeerId, timeline: StepTimeline) -> None:
        """Forward a peer's timeline to the watchers that trace its run."""
        run = self._state.runs.get(timeline.run_id)
        assignments = run.attempt.assignments if run is not None else ()
        layers = {assignment.peer_id: assignment.layers for assignment in assignments}
        if peer_id in layers:
            traced = PeerTimeline(peer_id=peer_id, layers=layers[peer_id], timeline=timeline)
            self._watchers.trace(traced)

    # ---- clients

    async def _submit(self, stream: MessageStream[RunStatus, SubmitPart]) -> None:
        run_id = await self._submissions.receive(stream)
        await stream.send(status_of(self._state.runs[run_id], self._names))

    def _begin_run(self, run: Run, data_digest: bytes) -> None:
        """Add a submitted run, whose data has arrived, to the journal and to the state."""
        self._journal.write_run(run, data_digest)
        submitted = RunSubmitted(
            run.run_id, run.spec, run.owner, run.storage_key, run.priority, run.claim
        )
        try:
            self._handle(submitted)
        except JournalError:
            raise
        except Exception as error:  # noqa: BLE001 - it is logged, and fails the run
            self._state = self._state.with_run(run)  # the journal knows it already
            self._abort(run.run_id, error)

    async def _watch(self, stream: WatchStream) -> None:
        request = await stream.receive()
        run = self._named(request, stream.caller)
        is_tracing = request is not None and request.traced
        member = _member(stream.caller)
        watching = self._watchers.watching(run.run_id, is_tracing=is_tracing, member=member)
        with watching as watcher:
            # A watcher that does not read may be dropped during a send.
            await until_one_ends(self._send_history(stream, run, watcher), watcher.dropped())

    async def _send_history(self, stream: WatchStream, run: Run, watcher: Watcher) -> None:
        """Send a watcher the run's history, then its updates, until the run is over."""
        status = status_of(run, self._names)
        await stream.send(status)
        for first in range(0, status.committed_steps + 1, STEPS_AT_ONCE):
            for part in self._history_part(run, first, status.committed_steps):
                await stream.send(part)
        if status.phase.is_over:
            await stream.send(status)
            return
        event: RunEvent | PeerTimeline = status
        while not (isinstance(event, RunStatus) and event.phase.is_over):
            event = await watcher.next()
            await stream.send(event)

    def _history_part(
        self, run: Run, first: int, committed_steps: int
    ) -> list[Evaluated | StepCommitted]:
        """Return some steps and evaluations, in order.

        Weights are evaluated before the next step.
        """
        stop = min(first + STEPS_AT_ONCE, committed_steps + 1)
        steps = self._journal.steps(run.run_id, first, STEPS_AT_ONCE)
        evaluations = self._journal.evaluations(run.run_id, first, stop)
        counted = [step for step in steps if step.step < committed_steps]
        return sorted([*evaluations, *counted], key=lambda one: one.step)

    async def _end(
        self,
        kind: type[RunCancelled | ResultCollected],
        stream: MessageStream[RunStatus, CancelRequest | CollectedRequest],
    ) -> None:
        """End a run, because its owner cancels it or has its result."""
        request = await stream.receive()
        run = self._named(request, stream.caller)
        if is_owner(stream.caller, run.owner):  # a reader may have the result, and ends nothing
            if kind is RunCancelled:
                actor = Actor.CLIENT if stream.caller is None else Actor.OWNER
                self._handle(RunCancelled(run.run_id, actor))
            else:
                self._handle(ResultCollected(run.run_id))
        await stream.send(status_of(self._state.runs[run.run_id], self._names))

    async def _status(self, stream: MessageStream[SwarmStatus | Encoded, StatusRequest]) -> None:
        request = await stream.receive() or StatusRequest()
        await stream.send(Encoded(await self._frames.frame(request, stream.caller)))

    def _encoded_status(self, page: StatusRequest, caller: Caller | None) -> bytes:
        return STATUS.reply.to_bytes(self.status(page, caller))

    @property
    def is_ready(self) -> bool:
        """Whether the coordinator plans and commits: time passes, and the journal is writable."""
        is_late = self._clock.now_s() - self._state.seen_at_s >= READY_S
        return not self._journal_failure.done() and self._state.seen_at_s < math.inf and not is_late

    @property
    def event_counts(self) -> Mapping[EventKind, int]:
        """Number of events of each kind."""
        return self._event_log.counts

    def losses(self, run_id: RunId, first: int, max_points: int) -> list[StepCommitted | Evaluated]:
        """Return the values of a run's loss: steps from `first` on, and evaluations, in order.

        The steps lack their traffic.

        Args:
            run_id: Run of any client.
            first: First step.
            max_points: Most steps, and most evaluations; of more, as many are chosen evenly, with
                the last one.

        Raises:
            NotFound: There is no such run.
        """
        run = self._state.runs.get(run_id)
        if run is None:
            raise NotFound(f"{run_id} is not known here")
        stop = run.past.all_steps
        steps = self._journal.chosen_steps(run_id, _evenly(first, stop, max_points))
        found = self._journal.evaluations(run_id, first, stop + 1)
        evaluations = [found[i] for i in _evenly(0, len(found), max_points)]
        return sorted([*evaluations, *steps], key=lambda one: one.step)

    # ---- requests of the swarm's operator, for any client's run

    def cancel(self, run_id: RunId) -> None:
        """Cancel a run.

        Raises:
            NotFound: There is no such run.
            OutOfTurn: The run is over.
        """
        self._steer(RunCancelled(run_id, Actor.OPERATOR), last=RunPhase.FINISHED)

    def pause(self, run_id: RunId) -> None:
        """Pause a run after its present step; raises as `cancel` does."""
        self._steer(RunPaused(run_id, Actor.OPERATOR))

    def resume(self, run_id: RunId) -> None:
        """Resume a paused run; raises as `cancel` does."""
        self._steer(RunResumed(run_id, Actor.OPERATOR))

    def change_rate(self, run_id: RunId, learning_rate: float) -> None:
        """Change the peak learning rate from the next step on; raises as `cancel` does.

        Raises:
            BadInput: The rate is not finite or negative, the run was submitted with 0, or there
                were too many changes.
        """
        run = self._state.runs.get(run_id)
        if not 0.0 <= learning_rate <= MAX_LEARNING_RATE:
            raise BadInput(
                f"learning_rate: expected 0 to {MAX_LEARNING_RATE:g}, got {learning_rate}"
            )
        if run is not None and not run.spec.train.learning_rate:
            raise BadInput(f"{run_id} was submitted with learning rate 0, which cannot change")
        if run is not None and len(run.steering.rates) >= MAX_RATE_CHANGES:
            raise BadInput(f"{run_id} had {MAX_RATE_CHANGES} learning rates already")
        self._steer(RateChanged(run_id, learning_rate, Actor.OPERATOR))

    def change_codecs(self, run_id: RunId, forward: str = "", backward: str = "") -> None:
        """Change the codecs from the next step on; raises as `cancel` does.

        Args:
            run_id: Run to change.
            forward, backward: Codecs in the form of `--fw` and `--bw`; empty: no change.

        Raises:
            BadCodec: A codec does not exist, or cannot continue with the present buffers.
            BadInput: There were too many changes, or the codecs follow a quality.
        """
        run = self._state.runs.get(run_id)
        if run is None:
            raise NotFound(f"{run_id} is not known here")
        if run.spec.train.quality:
            raise BadInput(
                f"{run_id} requests a quality (--quality {run.spec.train.quality:g}), which "
                "determines its codecs; submit it with --fw and --bw to choose them"
            )
        wanted = run.spec_at(run.past.all_steps + 1).train.codecs
        codecs = Codecs(forward or wanted.forward, backward or wanted.backward)
        run.spec.with_codecs(codecs)
        if len(run.steering.codecs) >= MAX_CODEC_CHANGES:
            raise BadInput(f"{run_id} had {MAX_CODEC_CHANGES} pairs of codecs already")
        self._steer(CodecsChanged(run_id, codecs, Actor.OPERATOR))

    def _steer(
        self,
        event: RunCancelled | RunPaused | RunResumed | RateChanged | CodecsChanged,
        last: RunPhase = RunPhase.EXPORTING,
    ) -> None:
        run = self._state.runs.get(event.run_id)
        if run is None:
            raise NotFound(f"{event.run_id} is not known here")
        if run.phase > last:
            raise OutOfTurn(f"{event.run_id} is over: {run.phase.name.lower()}")
        self._handle(event)

    def status(self, page: StatusRequest = FIRST_PAGE, caller: Caller | None = None) -> SwarmStatus:
        """Return a page of the status, redacted for this caller; None: all of it."""
        relays = self._relays.statuses if self._relays is not None else ()
        found = overview(self._state, page, caller, self._capacity.machines)
        return replace(
            with_names(replace(found, relays=relays), self._names),
            version=described_version(),
            unix_s=self._unix_s(),
            next_event=self._event_log.next_serial,
            warnings=self.warnings,
        )

    async def events(
        self, request: EventsRequest, caller: Caller | None = None
    ) -> AsyncGenerator[SwarmEvent, None]:
        """Yield events, redacted for this caller; None: all of them."""
        async with aclosing(self._event_pages(request, caller)) as pages:
            async for page in pages:
                for event in page:
                    yield event

    async def _event_pages(
        self, request: EventsRequest, caller: Caller | None
    ) -> AsyncGenerator[tuple[SwarmEvent, ...], None]:
        async with aclosing(self._event_log.pages(request.since, follows=request.follows)) as pages:
            async for page in pages:
                yield tuple(
                    event_message(self._state, caller, event, self._names)
                    for event in page
                    if request.run_id in (None, event.event.run_id)
                )

    async def _events(self, stream: EventsStream) -> None:
        request = await stream.receive() or EventsRequest()
        if not request.follows:
            await self._send_events(stream, request)
            return
        with self._followers.taken(_member(stream.caller)) as place:
            await until_one_ends(self._send_events(stream, request), place.lost())

    async def _send_events(self, stream: EventsStream, request: EventsRequest) -> None:
        async with aclosing(self._event_pages(request, stream.caller)) as pages:
            async for page in pages:
                if page:
                    await stream.send(self._encoded_page(page))

    def _named(
        self,
        request: WatchRequest | CancelRequest | CollectedRequest | None,
        caller: Caller | None,
    ) -> Run:
        """Return the run that a client names, or its only one: its own, or shared with it.

        A shared run may be watched and fetched, but not cancelled.

        Raises:
            BadOption: The request names no run, and several are possible.
            NotFound: There is no such run, or it is another client's.
        """
        ends = isinstance(request, CancelRequest)
        may = _may_end if ends else _may_read
        runs = [run for run in self._state.runs.values() if may(caller, run)]
        name = request.run_id if request is not None else None
        if name is None:
            return _only(runs, caller, ends=ends)
        run = next((run for run in runs if run.run_id == name), None)
        if run is None:
            known = ", ".join(r.run_id for r in runs) or "none"
            raise NotFound(f"{name} is not known here, or not yours; known: {known}")
        return run


def _is_readable(run: Run) -> bool:
    return run.detail is None or run.detail.kind is not ReasonKind.RUN_UNREADABLE


def _encoded_page(events: tuple[SwarmEvent, ...]) -> Encoded:
    return Encoded(EVENTS.reply.to_bytes(SwarmEvents(events=events)))


def _only(runs: Sequence[Run], caller: Caller | None, *, ends: bool) -> Run:
    """Return the only one of these runs that is not over: the client's own, or else a shared one.

    If all are over, the newest may be watched.
    """
    live = [run for run in runs if run.phase <= RunPhase.FINISHED]
    live = [run for run in live if _may_end(caller, run)] or live
    if len(live) == 1:
        return live[0]
    if live:
        listed = "; ".join(_short_description(run, caller) for run in live[:MAX_LISTED])
        more = f"; and {len(live) - MAX_LISTED} more" if len(live) > MAX_LISTED else ""
        raise BadOption(f"--run: {len(live)} runs are under way, name one of them: {listed}{more}")
    if not runs:
        raise NotFound("you have no runs yet; submit one with 'client train'")
    if ends:
        raise BadOption("--run: no run of yours is under way; 'swarm-ft status' lists all")
    return runs[-1]


def _short_description(run: Run, caller: Caller | None) -> str:
    whose = "" if _may_end(caller, run) else f", of client {run.owner}"
    steps = f"step {run.past.all_steps}/{run.spec.train.num_steps}"
    return f"{run.run_id} ({run.phase.name.lower()}, {steps}{whose})"


def _evenly(first: int, stop: int, max_points: int) -> list[int]:
    """Return the numbers from `first` to before `stop`; of more than `max_points`, every nth.

    The numbers are counted from the end, so that the last one is among them.
    """
    stride = max(1, math.ceil((stop - first) / max_points))
    return list(range(stop - 1, first - 1, -stride))[::-1]


def _member(caller: Caller | None) -> str:
    """Return the name under which calls are counted; empty without keys."""
    return caller.name if caller is not None else ""


def _may_end(caller: Caller | None, run: Run) -> bool:
    return is_owner(caller, run.owner)


def _may_read(caller: Caller | None, run: Run) -> bool:
    return may_read(caller, run.owner, run.spec.train.readers)
