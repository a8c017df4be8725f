"""The swarm as a client sees it: submit, watch, cancel, fetch. Knows no files but shards."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import Busy, NotFound, ProtocolError, SwarmError, Unavailable
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.ids import PeerId, RunId, SampleId
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.capacity import Placed, PlaceRequest
from swarm_ft.protocol.messages.client import (
    CancelRequest,
    CollectedRequest,
    Contributor,
    MemberStatus,
    RunEvent,
    RunPhase,
    RunStatus,
    RunSummary,
    SampleTokens,
    StatusRequest,
    SubmitHeader,
    SwarmStatus,
    WatchRequest,
)
from swarm_ft.protocol.messages.control import Stage, stages_of
from swarm_ft.protocol.messages.enrolment import NamedMember, name_lookup
from swarm_ft.protocol.messages.events import EventsRequest, SwarmEvent
from swarm_ft.protocol.messages.shard import ShardFile, ShardName
from swarm_ft.protocol.messages.timeline import PeerTimeline
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.transfer import Downloader
from swarm_ft.transport.base import Channel, Transport, call
from swarm_ft.transport.methods import CANCEL, COLLECTED, EVENTS, PLACE, STATUS, SUBMIT, WATCH

logger = get_logger(__name__)

CALL_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 300.0
"""How long a coordinator may take to check a job and write it down, once it has all of it."""
FIND_TIMEOUT_S = 20.0
"""How long a coordinator may take to appear in the DHT."""
RETRY_S = 0.5
MAX_RESUBMITS = 40
"""A coordinator that is started again has 20 s to be there."""
PART_BYTES = 256 << 10
"""Of samples that are sent in one message; one at least."""
BUSY_TIMEOUT_S = 3600.0
"""How long a coordinator may have too many others to serve."""
MAX_BUSY_REST_S = 15.0
"""Between two tries; the first rests are shorter, and all are drawn, so that clients disperse."""


class SwarmClient:
    """A client's connection; every call finds the coordinator in the directory anew.

    Attributes:
        name: of this client's key; empty if it has none.
    """

    def __init__(self, directory: Directory, transport: Transport, name: str = "") -> None:
        self.name = name
        self._directory = directory
        self._transport = transport
        self._downloader = Downloader(directory, transport, on_fault=_log_fault)

    async def submit(
        self,
        spec: RunSpec,
        samples: Sequence[bytes],
        *,
        run_id: RunId | None = None,
        priority: int | None = None,
        on_trouble: Callable[[str], None] = lambda _trouble: None,
    ) -> RunStatus:
        """Hand in a job; `samples[i]` are sample i's token ids, little-endian uint32.

        A job whose answer was lost is handed in again under the same name, which makes it no
        second run.

        Args:
            run_id: the run's name; drawn if None.
            priority: 1 to 9, which of its owner's jobs comes first; None for the usual 3.

        Raises:
            Busy: the coordinator had too many others to serve for an hour.
            Unavailable: no coordinator is found, or its connections break again and again.
            SwarmError: the coordinator's reason not to take it.
        """
        run_id = run_id or RunId(f"run-{secrets.token_hex(4)}")
        told, num_lost, rests = "", 0, _busy_rests()
        trouble: Unavailable
        while True:
            try:
                return await self._submit_once(run_id, spec, samples, priority)
            except Busy as error:
                trouble, rest_s = error, next(rests, None)
            except Unavailable as error:
                num_lost += 1
                trouble, rest_s = error, RETRY_S if num_lost <= MAX_RESUBMITS else None
            if rest_s is None:
                raise trouble
            if trouble.message != told:
                on_trouble(f"submitting the job again: {trouble.message}")
            told = trouble.message
            await asyncio.sleep(rest_s)

    async def _submit_once(
        self, run_id: RunId, spec: RunSpec, samples: Sequence[bytes], priority: int | None
    ) -> RunStatus:
        async with self._coordinator() as channel:
            stream = channel.open(SUBMIT)
            header = SubmitHeader(
                spec=spec, spec_digest=spec.digest(), run_id=run_id, priority=priority
            )
            await stream.send(header)
            num_together = max(1, PART_BYTES // len(samples[0])) if samples else 1
            for first in range(0, len(samples), num_together):
                tokens = b"".join(samples[first : first + num_together])
                await stream.send(SampleTokens(sample=SampleId(first), token_ids=tokens))
            await stream.finish()
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    reply = await stream.receive()
            except TimeoutError:
                raise Unavailable(
                    f"the coordinator did not answer the submission within {ANSWER_TIMEOUT_S:g} s"
                ) from None
            if reply is None:
                raise Unavailable("the coordinator ended the submission without an answer")
            return reply

    async def watch(
        self,
        run_id: RunId | None,
        on_trouble: Callable[[str], None],
        on_timeline: Callable[[PeerTimeline], None] | None = None,
    ) -> AsyncGenerator[RunEvent, None]:
        """All events of a run (the only one, if None), then all that follow, until it is over.

        A coordinator that goes away is waited for; then all events come again, from the first.

        Args:
            run_id: the run's name.
            on_trouble: told what is waited for.
            on_timeline: told what peers did in every step that is planned meanwhile; None does not
                have them record it.

        Raises:
            NotFound: there is no such run.
        """
        told = ""
        while True:
            try:
                async with self._coordinator() as channel:
                    stream = channel.open(WATCH)
                    traced = on_timeline is not None
                    await stream.send(WatchRequest(run_id=run_id, traced=traced))
                    await stream.finish()
                    while (event := await stream.receive()) is not None:
                        told = ""
                        if not isinstance(event, PeerTimeline):
                            yield event
                        elif on_timeline is not None:
                            on_timeline(event)
                    return
            except Unavailable as error:
                if error.message != told:  # once, not at every try
                    on_trouble(f"waiting for the coordinator: {error.message}")
                told = error.message
                await asyncio.sleep(RETRY_S)

    async def events(
        self,
        since: int,
        *,
        run_id: RunId | None = None,
        follows: bool = False,
        on_trouble: Callable[[str], None] = lambda _trouble: None,
    ) -> AsyncGenerator[SwarmEvent, None]:
        """What happened in the swarm, from this serial number on, and perhaps what happens.

        Args:
            since: the first that is wanted.
            run_id: only what is about this run.
            follows: go on; a coordinator that goes away is waited for.
            on_trouble: told what is waited for.

        Raises:
            SwarmError: the coordinator cannot be asked; of one that is followed it is waited for.
        """
        told = ""
        while True:
            try:
                async with self._coordinator() as channel:
                    stream = channel.open(EVENTS)
                    await stream.send(EventsRequest(since=since, run_id=run_id, follows=follows))
                    await stream.finish()
                    while (page := await stream.receive()) is not None:
                        for event in page.events:
                            told, since = "", event.serial + 1
                            yield event
                    return
            except Unavailable as error:
                if not follows:
                    raise
                if error.message != told:
                    on_trouble(f"waiting for the coordinator: {error.message}")
                told = error.message
                await asyncio.sleep(RETRY_S)

    async def cancel(self, run_id: RunId | None) -> RunStatus:
        """End a run (the only one, if None); what it trained is lost."""
        async with self._coordinator() as channel:
            return await call(channel, CANCEL, CancelRequest(run_id=run_id), CALL_TIMEOUT_S)

    async def collected(self, run_id: RunId) -> None:
        """Say that the result is safe here, so that peers may let go of it."""
        async with self._coordinator() as channel:
            await call(channel, COLLECTED, CollectedRequest(run_id=run_id), CALL_TIMEOUT_S)

    async def status(self) -> SwarmStatus:
        """All members and all runs, page after page: who comes or goes meanwhile may be missed."""
        members: dict[PeerId, MemberStatus] = {}
        runs: dict[RunId, RunSummary] = {}
        contributors: tuple[Contributor, ...] = ()
        names: dict[str, NamedMember] = {}
        first = StatusRequest()
        async with self._coordinator() as channel:
            while True:
                page = await call(channel, STATUS, first, CALL_TIMEOUT_S)
                members.update((member.peer_id, member) for member in page.members)
                runs.update((run.run_id, run) for run in page.runs)
                names.update((one.member_id, one) for one in page.names)
                contributors = contributors or page.contributors  # of the first page
                first = StatusRequest(
                    first_member=first.first_member + len(page.members),
                    first_run=first.first_run + len(page.runs),
                )
                has_more = first.first_member < page.num_members or first.first_run < page.num_runs
                if not has_more or not (page.members or page.runs):
                    return replace(
                        page,
                        members=tuple(members.values()),
                        runs=tuple(runs.values()),
                        contributors=contributors,
                        names=tuple(names.values()),
                    )

    async def place(self, spec: RunSpec, run_id: RunId | None = None) -> Placed:
        """Who would host what if this job began now, or who hosts a run.

        Args:
            spec: of the job.
            run_id: a run of this client, which has that spec; None: the job was not submitted yet.

        Raises:
            SwarmError: the coordinator cannot be asked, or says no.
        """
        async with self._coordinator() as channel:
            request = PlaceRequest(spec=spec, run_id=run_id)
            return await call(channel, PLACE, request, CALL_TIMEOUT_S)

    async def run(self, run_id: RunId | None) -> RunStatus:
        """A run of this client's (the only one, if None) as it is now.

        Raises:
            BadOption: it may be one or another.
            NotFound: there is no such run.
        """
        async with self._coordinator() as channel:
            stream = channel.open(WATCH)
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await stream.send(WatchRequest(run_id=run_id))
                    await stream.finish()
                    status = await stream.receive()
            except TimeoutError:
                raise Unavailable(f"{stream.remote} did not tell of a run in time") from None
            finally:
                await stream.cancel()
        if not isinstance(status, RunStatus):
            raise ProtocolError(f"{stream.remote}: expected a run's status first")
        return status

    async def fetch_result(
        self, status: RunStatus, directory: Path, on_trouble: Callable[[str], None]
    ) -> tuple[Path, ...] | None:
        """As `fetch_shards`; a peer that is away is waited for as long as its part may come back.

        Returns:
            None once that part, or all of it, is lost: the run is not finished any more.
        """
        told = ""
        while True:
            try:
                return await self.fetch_shards(status, directory)
            except Unavailable as error:
                if error.message != told:
                    on_trouble(error.message)
                told = error.message
            await asyncio.sleep(RETRY_S)
            known = await self._as_known_now(status)
            if known is None:
                return None
            status = known

    async def _as_known_now(self, status: RunStatus) -> RunStatus | None:
        """The newest status with the same result; None if that is lost, as far as is known."""
        try:
            known = await self.run(status.run_id)
        except Unavailable:
            return status
        except NotFound:
            return None
        is_same = known.phase is RunPhase.FINISHED and known.attempt == status.attempt
        return known if is_same else None

    async def fetch_shards(self, status: RunStatus, directory: Path) -> tuple[Path, ...]:
        """The trained stages of a finished run, first to last, as files in `directory`.

        What is there already, from an earlier call, is not fetched again.

        Raises:
            Unavailable: nobody who holds a stage of the result gives it now.
        """
        stages = stages_of(status.assignments)
        return tuple([await self._fetch_stage(status, stage, directory) for stage in stages])

    async def _fetch_stage(self, status: RunStatus, stage: Stage, directory: Path) -> Path:
        name = result_name(status, stage.layers)
        peers = " or ".join(map(name_lookup(status.names), stage.peers))
        trouble = f"layers {stage.layers} of the result: peer {peers} does not answer"
        for file, sources in holders(status, stage):
            # Named by its digest, it is what it should be in whatever call it was fetched.
            path = directory / f"{file.digest.hex()}.safetensors"
            if path.exists():
                return path
            try:
                chunks = await self._downloader.list_chunks(name, file, sources)
            except Unavailable:
                continue
            try:
                await self._downloader.download(name, chunks, sources, path)
            except Unavailable as error:
                trouble = error.message
            else:
                return path
        raise Unavailable(f"{trouble}; waiting until it is back, or the result is made again")

    async def peer_channel(self, peer: PeerId) -> Channel:
        """A way to a peer.

        Raises:
            Unavailable: nobody here knows where it is.
        """
        found = await self._directory.find(Role.PEER)
        return self._transport.connect(found.get(peer, ""), peer)

    @asynccontextmanager
    async def _coordinator(self) -> AsyncIterator[Channel]:
        channel = self._transport.connect(await self._find_coordinator(), COORDINATOR_NAME)
        try:
            yield channel
        finally:
            await channel.close()

    async def _find_coordinator(self) -> str:
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                found = await self._directory.find(Role.COORDINATOR)
                while not found:
                    await asyncio.sleep(RETRY_S)
                    found = await self._directory.find(Role.COORDINATOR)
        except TimeoutError:
            raise Unavailable(
                "no coordinator is in the DHT; is one started with the same --initial-peers "
                "and --dht-prefix?"
            ) from None
        return next(iter(found.values()))


def result_name(status: RunStatus, layers: LayerRange) -> ShardName:
    """What a stage's part of a finished run's result is called."""
    return ShardName(
        run_id=status.run_id, step=status.steps_in_result, layers=layers, is_result=True
    )


def holders(status: RunStatus, stage: Stage) -> list[tuple[ShardFile, list[PeerId]]]:
    """Who of a stage's replicas gives which file, the most common one first, then the first told.

    All should have the same one. Should they not, each is still a trained stage.
    """
    found: dict[ShardFile, list[PeerId]] = {}
    for result in status.results:
        if result.peer_id in stage.peers:
            found.setdefault(result.file, []).append(result.peer_id)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _log_fault(source: PeerId, error: SwarmError) -> None:
    """A source that is away is tried again, and waited for; one that lies is worth a word."""
    level = logging.WARNING if isinstance(error, ProtocolError) else logging.DEBUG
    logger.log(level, "peer %s: %s", source, error.message)


def _busy_rests() -> Iterator[float]:
    """Seconds to rest before each new try at a busy coordinator; they end with patience."""
    longest_s, rested_s = RETRY_S, 0.0
    while rested_s < BUSY_TIMEOUT_S:
        rest_s = longest_s * random.uniform(0.5, 1.0)
        yield rest_s
        rested_s += rest_s
        longest_s = min(2 * longest_s, MAX_BUSY_REST_S)
