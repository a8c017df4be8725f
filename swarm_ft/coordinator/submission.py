"""Submission of jobs: a header and every sample's tokens arrive, are checked, and become a run.

A thread writes the tokens to disk as they arrive: neither memory nor the time of the event loop
depends on their number. The client chooses the run's name, so a job that it submits again, because
it received no reply, is the same run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from swarm_ft.base.sealing import new_key
from swarm_ft.coordinator.facts.quotas import Quotas, Upload
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.tokens import NewTokenFile, TokenFiles
from swarm_ft.coordinator.places import Place
from swarm_ft.digest import RunningDigest, check_spec_digest
from swarm_ft.errors import (
    BadDataset,
    BadOption,
    Busy,
    MalformedMessage,
    NotAllowed,
    OutOfTurn,
    RunMismatch,
    Unavailable,
)
from swarm_ft.ids import RunId
from swarm_ft.protocol.machines.rate import Floor
from swarm_ft.protocol.messages.client import (
    RunStatus,
    SampleTokens,
    SubmitHeader,
    SubmitPart,
)
from swarm_ft.protocol.spec import sample_rows
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY, NO_CLAIM, Claim
from swarm_ft.protocol.spec.run_spec import BYTES_PER_TOKEN, RunSpec
from swarm_ft.protocol.spec.tasks import task_of
from swarm_ft.transport.base import MessageStream, until_one_ends

MAX_SUBMISSIONS = 16
"""Jobs that may arrive at the same time, each with a megabyte or two of memory. One thread checks
them all; most of the time they wait for their networks.
"""
MAX_CLIENT_SUBMISSIONS = 2
"""Simultaneous jobs of one client, where clients have keys. When there is no room for another
client's job, the slowest job of the client with the most jobs makes room.
"""
MAX_KEYLESS_SUBMISSIONS = 4
"""Simultaneous jobs of all clients together, where they have no keys."""
EVICTED = "another client's job gets the place of this one, the slowest upload; submit it again"
EVICT_AFTER_S = 5.0
"""Least seconds before a job makes room for a client that would then have as many jobs."""
BATCH_BYTES = 1 << 20
"""Bytes of tokens that are checked and written at a time."""
PART_TIMEOUT_S = 60.0
"""Seconds of a client's silence after which its job makes room. The same holds for a job this far
behind `Quotas.bytes_per_s`.
"""

SubmitStream = MessageStream[RunStatus, SubmitPart]
T = TypeVar("T")


class _Intake:
    """Tokens of one job as they arrive; only the writer's thread calls it."""

    def __init__(self, job: SubmitHeader) -> None:
        self._job = job
        self._digest = RunningDigest(job.spec.train.data_bytes)
        self._file: NewTokenFile | None = None

    def open(self, files: TokenFiles) -> None:
        """Write from now on; without this call, tokens are only checked and digested."""
        self._file = files.begin(self._job.run_id, self._job.spec)

    def take(self, first: int, tokens: bytes) -> None:
        """Check and store samples from `first` on."""
        _check_rows(self._job, first, tokens)
        self._digest.update(tokens)
        if self._file is not None:
            self._file.append(tokens)

    def digest(self) -> bytes:
        """Return the digest of all tokens, once they are here."""
        return self._digest.digest()

    def keep(self) -> None:
        """Make the tokens durable."""
        if self._file is not None:
            self._file.keep()

    def discard(self) -> None:
        """Delete tokens that were not kept."""
        if self._file is not None:
            self._file.discard()


class _Incoming(Place):
    """An arriving job, which may lose its place to another client's.

    Args:
        upload: What quotas count of it.
        begun_s: Seconds of the loop's clock at its start.
    """

    def __init__(self, upload: Upload, begun_s: float) -> None:
        super().__init__(upload.owner, EVICTED)
        self.upload = upload
        self.begun_s = begun_s
        self.num_bytes = 0
        self.is_whole = False

    def bytes_per_s(self, now_s: float) -> float:
        """Return its mean rate until now, over a second at least."""
        return self.num_bytes / max(1.0, now_s - self.begun_s)


class Submissions:
    """Turns every submission into a run, once.

    Args:
        journal: Journal of runs, with their tokens.
        known: Function that returns the run of a name, if there is one.
        begin: Callback with a new run and its tokens' digest, once these are on disk.
        quotas: Limits on clients' jobs.
        runs: Function that returns all known runs.
        claims: Function that returns a client's claim by its name.
        keeps_snapshots: Whether this coordinator keeps snapshots.
    """

    def __init__(  # noqa: PLR0913 - what its service has to give
        self,
        journal: Journal,
        *,
        known: Callable[[RunId], Run | None],
        begin: Callable[[Run, bytes], None],
        quotas: Quotas,
        runs: Callable[[], Collection[Run]],
        keeps_snapshots: bool = False,
        claims: Callable[[str], Claim] | None = None,
    ) -> None:
        self._claims = claims
        self._journal = journal
        self._known = known
        self._begin = begin
        self._quotas = quotas
        self._runs = runs
        self._keeps_snapshots = keeps_snapshots
        self._incoming: list[_Incoming] = []
        # One thread works in the order of requests, even if nobody waits for one any more.
        self._writer = ThreadPoolExecutor(1, "tokens")
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def receive(self, stream: SubmitStream) -> RunId:
        """Receive a job and make it a run, unless it is one already.

        If it is cancelled after the last sample, the job still becomes a run.

        Raises:
            BadOption: The job keeps its best weights, and there are no snapshots here.
            Busy: Too many other jobs arrive, or all together have too much here.
            OverQuota: The client has reached a limit.
            RunMismatch: The client's digest of the RunSpec differs, or a run of that name has
                another spec, other data, or another owner.
            NotAllowed: The model's digests are another client's.
            BadDataset: Samples are missing, too many, or invalid (`sample_rows.refusal`); or the
                job is larger than allowed.
            MalformedMessage: A field is out of its bounds.
            Unavailable: The client is gone, or too slow.
            JournalFull: The disk has no room.
            JournalError: The disk cannot be written.
        """
        parts = _Parts(stream, self._quotas.bytes_per_s)
        job = _job(stream.remote, await parts.next())
        if job.spec.train.load_best_model_at_end and not self._keeps_snapshots:
            raise BadOption(
                "--load-best-model-at-end: this coordinator keeps no snapshots; start it and the "
                "peers with --snapshots URL, or without --keepers 0"
            )
        known = self._known(job.run_id)
        owner = stream.caller.name if stream.caller is not None else ""
        _check_digests_owner(job.spec, owner)
        if known is not None and not _is_same(known, job, owner):
            raise _is_another(job.run_id)
        upload = Upload(owner, job.spec.train.data_bytes)
        with self._place(stream, upload, is_new=known is None) as incoming:
            intake = _Intake(job)
            parts.incoming = incoming
            try:
                if known is None:
                    await self._writing(intake.open, self._journal.tokens)
                await until_one_ends(self._take_in(parts, job, intake), incoming.lost())
            except BaseException:
                self._writing(intake.discard)
                raise
            incoming.is_whole = True
            await self._run_uncancellable(self._accept(job, intake, owner))
        return job.run_id

    async def _take_in(self, parts: _Parts, job: SubmitHeader, intake: _Intake) -> None:
        num_samples = 0
        while tokens := await _next_batch(parts, job, num_samples):
            await self._writing(intake.take, num_samples, tokens)
            num_samples += len(tokens) // job.spec.train.sample_bytes
        if num_samples != job.spec.train.num_rows:
            expected = job.spec.train.num_rows
            raise BadDataset(f"data: expected {expected} samples, got {num_samples}")

    async def _accept(self, job: SubmitHeader, intake: _Intake, owner: str) -> None:
        try:
            async with self._one_at_a_time:
                digest = await self._writing(intake.digest)
                known = self._known(job.run_id)
                if known is None:
                    await self._writing(intake.keep)
                    self._begin(_run_of(job, owner, await self._claim(owner)), digest)
                elif (
                    not _is_same(known, job, owner)
                    or self._journal.data_digest(job.run_id) != digest
                ):
                    raise _is_another(job.run_id)
        finally:
            await self._writing(intake.discard)

    async def _claim(self, owner: str) -> Claim:
        if self._claims is None or not owner:
            return NO_CLAIM
        return await asyncio.to_thread(self._claims, owner)

    @contextmanager
    def _place(self, stream: SubmitStream, upload: Upload, *, is_new: bool) -> Iterator[_Incoming]:
        who = str(stream.caller or "this swarm's clients")
        # A repeated job makes no second run: it counts as a submission only.
        runs = self._runs() if is_new else ()
        now_s = asyncio.get_running_loop().time()
        for evicted in self._jobs_to_evict(upload, runs, who, now_s):
            self._incoming.remove(evicted)
            evicted.lose()
        incoming = _Incoming(upload, now_s)
        self._incoming.append(incoming)
        try:
            yield incoming
        finally:
            if incoming in self._incoming:
                self._incoming.remove(incoming)

    def _jobs_to_evict(
        self, upload: Upload, runs: Collection[Run], who: str, now_s: float
    ) -> list[_Incoming]:
        """Return the fewest jobs that must make room for this one; raise if none can."""
        staying, evicted = list(self._incoming), list[_Incoming]()
        while True:
            try:
                self._check([one.upload for one in staying], upload, runs, who)
            except Busy:
                slowest = _slowest(staying, upload.owner, now_s)
                if slowest is None:
                    raise
                staying.remove(slowest)
                evicted.append(slowest)
            else:
                return evicted

    def _check(
        self, uploads: list[Upload], upload: Upload, runs: Collection[Run], who: str
    ) -> None:
        own = sum(one.owner == upload.owner for one in uploads)
        most_own = MAX_CLIENT_SUBMISSIONS if upload.owner else MAX_KEYLESS_SUBMISSIONS
        for num, most in ((own, most_own), (len(uploads), MAX_SUBMISSIONS)):
            if num >= most:
                raise Busy(f"{num} jobs are being submitted just now; try again later")
        self._quotas.check(runs, uploads, upload, who)

    def _writing(self, work: Callable[..., T], *args: object) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._writer, partial(work, *args))
        done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return done

    async def _run_uncancellable(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the client may be gone


# ---- arriving parts


class _Parts:
    """The parts of a job as they arrive, with time limits.

    Args:
        stream: Stream of the job.
        bytes_per_s: Least rate.
    """

    def __init__(self, stream: SubmitStream, bytes_per_s: float) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self._floor = Floor(bytes_per_s=bytes_per_s, grace_s=PART_TIMEOUT_S, begun_s=now_s)
        self._num_bytes = 0
        self.incoming: _Incoming | None = None

    async def next(self) -> SubmitPart | None:
        """Return the next part; None at the end.

        Raises:
            Unavailable: It did not arrive in time.
        """
        silent_s = self._loop.time() + PART_TIMEOUT_S
        late_s = self._floor.deadline_s(self._num_bytes)
        try:
            async with asyncio.timeout_at(min(silent_s, late_s)):
                part = await self._stream.receive()
        except TimeoutError:
            raise Unavailable(
                self._why_late(is_silent=not self._num_bytes or silent_s <= late_s)
            ) from None
        if isinstance(part, SampleTokens):
            self._num_bytes += len(part.token_ids)
            if self.incoming is not None:
                self.incoming.num_bytes = self._num_bytes
        return part

    def _why_late(self, *, is_silent: bool) -> str:
        remote = self._stream.remote
        if is_silent:
            return f"{remote} sent nothing of its job for {PART_TIMEOUT_S:g} s"
        return (
            f"{remote} sent {self._num_bytes} bytes of its job, and is {PART_TIMEOUT_S:g} s behind "
            f"the {self._floor.bytes_per_s:g} bytes a second that are required"
        )


def _slowest(incoming: Collection[_Incoming], owner: str, now_s: float) -> _Incoming | None:
    """Return the job that makes room: the slowest of the client with the most jobs.

    None if no client has more jobs than this owner, or all are too young; or without keys.
    """
    counts = Counter(one.upload.owner for one in incoming)

    def is_evictable(one: _Incoming) -> bool:
        more = counts[one.upload.owner] - counts[owner]
        is_old = now_s - one.begun_s >= EVICT_AFTER_S
        return bool(owner) and not one.is_whole and (more > 1 or (more == 1 and is_old))

    evictable = [one for one in incoming if is_evictable(one)]
    most = max((counts[one.upload.owner] for one in evictable), default=0)
    return min(
        (one for one in evictable if counts[one.upload.owner] == most),
        key=lambda one: one.bytes_per_s(now_s),
        default=None,
    )


def _job(remote: str, header: SubmitPart | None) -> SubmitHeader:
    if not isinstance(header, SubmitHeader):
        raise OutOfTurn(f"{remote}: expected a header as the first message")
    spec = header.spec
    check_spec_digest(f"run {header.run_id}", spec.digest(), header.spec_digest, "the client")
    return header


async def _next_batch(parts: _Parts, job: SubmitHeader, first: int) -> bytes:
    """Return samples from `first` on, about `BATCH_BYTES` of them; empty at the end."""
    pieces: list[bytes] = []
    num_bytes = 0
    while num_bytes < BATCH_BYTES and (part := await parts.next()) is not None:
        pieces.append(_samples_of(part, job, first + num_bytes // job.spec.train.sample_bytes))
        num_bytes += len(pieces[-1])
    return b"".join(pieces)


def _samples_of(part: SubmitPart, job: SubmitHeader, expected: int) -> bytes:
    """Return the tokens of adjoining samples, the first of which must be the expected one."""
    num_samples = job.spec.train.num_rows
    if not isinstance(part, SampleTokens):
        raise MalformedMessage(f"data: expected {num_samples} samples of tokens")
    sample, tokens = part.sample, part.token_ids
    if expected + len(tokens) // job.spec.train.sample_bytes > num_samples:
        raise MalformedMessage(f"data: expected {num_samples} samples of tokens, got more")
    if sample != expected:
        raise MalformedMessage(f"data: expected sample {expected}, got sample {sample}")
    whole, rest = divmod(len(tokens), job.spec.train.sample_bytes)
    if rest:
        raise BadDataset(
            f"sample {sample + whole}: expected {job.spec.train.seq_length} tokens, "
            f"got {rest // BYTES_PER_TOKEN}"
        )
    return tokens


def _check_rows(job: SubmitHeader, first: int, tokens: bytes) -> None:
    rows = sample_rows.rows_in(tokens, job.spec.train.seq_length)
    refused = task_of(job.spec.train).refusal(rows, job.spec.model.vocab_size)
    if refused is not None:
        row, why = refused
        raise BadDataset(f"sample {first + row}: {why}")


def _run_of(job: SubmitHeader, owner: str, claim: Claim) -> Run:
    return Run(
        run_id=job.run_id,
        spec=job.spec,
        owner=owner,
        storage_key=new_key(),
        priority=DEFAULT_PRIORITY if job.priority is None else job.priority,
        claim=claim,
    )


def _is_same(run: Run, job: SubmitHeader, owner: str) -> bool:
    """Whether a repeated submission is the run's own job, data aside."""
    return (run.spec.digest(), run.owner) == (job.spec.digest(), owner)


def _check_digests_owner(spec: RunSpec, owner: str) -> None:
    """Refuse digests that the client may have read in another client's run."""
    is_keyed = spec.model.nonce is not None and spec.inherited_digest is None
    if not is_keyed or spec.model.owner not in ("", owner):
        raise NotAllowed(
            "model: expected digests keyed with the name of the client that submits the job, got "
            "those of another client or of an earlier version"
        )


def _is_another(run_id: RunId) -> RunMismatch:
    return RunMismatch(
        f"{run_id} exists already, with other options or other data; submit the job under another "
        "name"
    )
