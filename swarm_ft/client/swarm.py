"""A client's view of the swarm: submit, watch, cancel, fetch. Writes no files but shards."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from swarm_ft.base.log import get_logger
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import Busy, NotFound, ProtocolError, SwarmError, Unavailable
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.ids import PeerId, RunId, SampleId
from swarm_ft.net.transfer import Downloader
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
from swarm_ft.transport.base import Channel, Transport, call
from swarm_ft.transport.methods import CANCEL, COLLECTED, EVENTS, PLACE, STATUS, SUBMIT, WATCH

logger = get_logger(__name__)

CALL_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 300.0
"""Seconds that a coordinator may take to check and store a job after receiving all of it."""
FIND_TIMEOUT_S = 20.0
"""Seconds that a coordinator may take to appear in the DHT."""
RETRY_S = 0.5
MAX_RESUBMITS = 40
"""Number of submissions after lost connections; a restarted coordinator has 20 s to return."""
PART_BYTES = 256 << 10
"""Bytes of samples in one message; a message has at least one sample."""
BUSY_TIMEOUT_S = 3600.0
"""Seconds for which a busy coordinator is tried again."""
MAX_BUSY_REST_S = 15.0
"""Longest rest between two tries, in seconds. The first rests are shorter; all are drawn at random,
so that clients disperse."""


class SwarmClient:
    """A client's connection; every call looks the coordinator up in the directory.

    Attributes:
        name: Member id of this client; empty without a key.
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
        """Submit a job; `samples[i]` are the token ids of sample i, little-endian uint32.

        If the reply is lost, the job is submitted again under the same name, which starts no second
        run.

        Args:
            spec: Parameters of the run.
            samples: Encoded samples.
            run_id: Name of the run; None draws one.
            priority: Priority among the owner's jobs, 1 to 9; None for the default.
            on_trouble: Callback for a message when the job is submitted again.

        Raises:
            Busy: The coordinator was busy with others for an hour.
            Unavailable: No coordinator was found, or its connections broke repeatedly.
            SwarmError: The coordinator refused the job; the message has its reason.
        """
        run_id = run_id or RunId(f"run-{secrets.token_hex(4)}")
        last_message, num_lost, rests = "", 0, _busy_rests()
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
            if trouble.message != last_message:
                on_trouble(f"submitting the job again: {trouble.message}")
            last_message = trouble.message
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
        """Yield all past events of a run (the only one, if None), then new ones until it ends.

        If the coordinator goes away, the client reconnects; all events then come again from the
        first.

        Args:
            run_id: Name of the run.
            on_trouble: Callback for a message when the client waits for the coordinator.
            on_timeline: Callback for peers' timelines of steps planned from now on; None turns
                their
                recording off.

        Raises:
            NotFound: There is no such run.
        """
        last_message = ""
        while True:
            try:
                async with self._coordinator() as channel:
                    stream = channel.open(WATCH)
                    traced = on_timeline is not None
                    await stream.send(WatchRequest(run_id=run_id, traced=traced))
                    await stream.finish()
                    while (event := await stream.receive()) is not None:
                        last_message = ""
                        if not isinstance(event, PeerTimeline):
                            yield event
                        elif on_timeline is not None:
                            on_timeline(event)
                    return
            except Unavailable as error:
                if error.message != last_message:  # once, not at every try
                    on_trouble(f"waiting for the coordinator: {error.message}")
                last_message = error.message
                await asyncio.sleep(RETRY_S)

    async def events(
        self,
        since: int,
        *,
        run_id: RunId | None = None,
        follows: bool = False,
        on_trouble: Callable[[str], None] = lambda _trouble: None,
    ) -> AsyncGenerator[SwarmEvent, None]:
        """Yield the swarm's events from a serial number on, and new ones if `follows` is set.

        Args:
            since: Serial number of the first event.
            run_id: Run that events must concern; None for all events.
            follows: Whether to wait for new events, also while the coordinator is away.
            on_trouble: Callback for a message when the client waits for the coordinator.

        Raises:
            SwarmError: The coordinator cannot be reached; with `follows` the client waits instead.
        """
        last_message = ""
        while True:
            try:
                async with self._coordinator() as channel:
                    stream = channel.open(EVENTS)
                    await stream.send(EventsRequest(since=since, run_id=run_id, follows=follows))
                    await stream.finish()
                    while (page := await stream.receive()) is not None:
                        for event in page.events:
                            last_message, since = "", event.serial + 1
                            yield event
                    return
            except Unavailable as error:
                if not follows:
                    raise
                if error.message != last_message:
                    on_trouble(f"waiting for the coordinator: {error.message}")
                last_message = error.message
                await asyncio.sleep(RETRY_S)

    async def cancel(self, run_id: RunId | None) -> RunStatus:
        """Cancel a run (the only one, if None) and discard its training."""
        async with self._coordinator() as channel:
            return await call(channel, CANCEL, CancelRequest(run_id=run_id), CALL_TIMEOUT_S)

    async def acknowledge_result(self, run_id: RunId) -> None:
        """Acknowledge that the result is stored here, so that peers may delete it."""
        async with self._coordinator() as channel:
            await call(channel, COLLECTED, CollectedRequest(run_id=run_id), CALL_TIMEOUT_S)

    async def status(self) -> SwarmStatus:
        """Return all members and runs, fetched page by page; changes meanwhile may be missed."""
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
        """Return the placement that this job would get now, or the one of a run.

        Args:
            spec: Parameters of the job.
            run_id: A run of this client with that spec; None for a job that is not submitted.

        Raises:
            SwarmError: The coordinator cannot be reached or refuses the job.
        """
        async with self._coordinator() as channel:
            request = PlaceRequest(spec=spec, run_id=run_id)
            return await call(channel, PLACE, request, CALL_TIMEOUT_S)

    async def run(self, run_id: RunId | None) -> RunStatus:
        """Return the current status of a run of this client (the only one, if None).

        Raises:
            BadOption: Several runs match.
            NotFound: There is no such run.
        """
        async with self._coordinator() as channel:
            stream = channel.open(WATCH)
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await stream.send(WatchRequest(run_id=run_id))
                    await stream.finish()
                    status = await stream.receive()
            except TimeoutError:
                raise Unavailable(f"{stream.remote} did not send a run's status in time") from None
            finally:
                await stream.cancel()
        if not isinstance(status, RunStatus):
            raise ProtocolError(f"{stream.remote}: expected a run's status first")
        return status

    async def fetch_result(
        self, status: RunStatus, directory: Path, on_trouble: Callable[[str], None]
    ) -> tuple[Path, ...] | None:
        """Fetch the result as `fetch_shards` does, waiting for peers that are away.

        Returns:
            The files; None once a part of the result is lost, so that the run is not finished any
            more.
        """
        last_message = ""
        while True:
            try:
                return await self.fetch_shards(status, directory)
            except Unavailable as error:
                if error.message != last_message:
                    on_trouble(error.message)
                last_message = error.message
            await asyncio.sleep(RETRY_S)
            newest = await self._newest_status(status)
            if newest is None:
                return None
            status = newest

    async def _newest_status(self, status: RunStatus) -> RunStatus | None:
        """Return the newest status with the same result; None once the result is lost."""
        try:
            newest = await self.run(status.run_id)
        except Unavailable:
            return status
        except NotFound:
            return None
        is_same = newest.phase is RunPhase.FINISHED and newest.attempt == status.attempt
        return newest if is_same else None

    async def fetch_shards(self, status: RunStatus, directory: Path) -> tuple[Path, ...]:
        """Fetch the trained stages of a finished run, first to last, as files in `directory`.

        Files of an earlier call are not fetched again.

        Raises:
            Unavailable: No peer that holds a stage of the result responds now.
        """
        stages = stages_of(status.assignments)
        return tuple([await self._fetch_stage(status, stage, directory) for stage in stages])

    async def _fetch_stage(self, status: RunStatus, stage: Stage, directory: Path) -> Path:
        name = result_name(status, stage.layers)
        peers = " or ".join(map(name_lookup(status.names), stage.peers))
        trouble = f"layers {stage.layers} of the result: peer {peers} does not answer"
        for file, sources in holders(status, stage):
            # The digest in the name makes a file of an earlier call safe to use.
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
        raise Unavailable(f"{trouble}; waiting until it is back, or the result is trained again")

    async def peer_channel(self, peer: PeerId) -> Channel:
        """Return a channel to a peer.

        Raises:
            Unavailable: The peer's address is unknown.
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
    """Return the name of a stage's part of a finished run's result."""
    return ShardName(
        run_id=status.run_id, step=status.steps_in_result, layers=layers, is_result=True
    )


def holders(status: RunStatus, stage: Stage) -> list[tuple[ShardFile, list[PeerId]]]:
    """Return each file of a stage's result with the replicas that hold it, most replicas first.

    All replicas should hold the same file. If they differ, each file is still a trained stage.
    """
    found: dict[ShardFile, list[PeerId]] = {}
    for result in status.results:
        if result.peer_id in stage.peers:
            found.setdefault(result.file, []).append(result.peer_id)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _log_fault(source: PeerId, error: SwarmError) -> None:
    """Log a failed source; only a protocol error is a warning, because absent peers are retried."""
    level = logging.WARNING if isinstance(error, ProtocolError) else logging.DEBUG
    logger.log(level, "peer %s: %s", source, error.message)


def _busy_rests() -> Iterator[float]:
    """Yield the seconds to rest before each new try at a busy coordinator, up to the timeout."""
    longest_s, rested_s = RETRY_S, 0.0
    while rested_s < BUSY_TIMEOUT_S:
        rest_s = longest_s * random.uniform(0.5, 1.0)
        yield rest_s
        rested_s += rest_s
        longest_s = min(2 * longest_s, MAX_BUSY_REST_S)
