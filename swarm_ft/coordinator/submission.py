"""A client's job: it arrives as a header and every sample's tokens, is checked, and becomes a run.

Tokens go to the disk as they come, written by a thread of their own: neither the memory nor the
time of the event loop depends on how many there are. The client draws the run's name, so that a
job that it submits again, because it heard no answer, is the same run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from swarm_ft.coordinator.facts.quotas import Quotas, Upload
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.tokens import NewTokenFile, TokenFiles
from swarm_ft.coordinator.places import Place
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
from swarm_ft.protocol.spec.digest import RunningDigest, check_spec_digest
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY, NO_CLAIM, Claim
from swarm_ft.protocol.spec.run_spec import BYTES_PER_TOKEN, RunSpec
from swarm_ft.protocol.spec.tasks import task_of
from swarm_ft.sealing import new_key
from swarm_ft.transport.base import MessageStream, until_one_ends

MAX_SUBMISSIONS = 16
"""Jobs that come in at a time, with a megabyte or two of memory each. One thread checks them all;
most of the time they wait for their networks."""
MAX_CLIENT_SUBMISSIONS = 2
"""Of one client, where clients are known. When there is no room for another client's job, the
slowest of the client with the most jobs makes room."""
MAX_KEYLESS_SUBMISSIONS = 4
"""Of all clients together, where they have no keys."""
EVICTED = "another client's job needs the place of this one, which came in slowest"
EVICT_AFTER_S = 5.0
"""How long a job has its place at least against a client that would have as many as its own."""
BATCH_BYTES = 1 << 20
"""Of tokens that are checked and written at a time."""
PART_TIMEOUT_S = 60.0
"""A client of which nothing comes for so long makes room for others, and so does one that is later
than this behind `Quotas.bytes_per_s`."""

SubmitStream = MessageStream[RunStatus, SubmitPart]
T = TypeVar("T")


class _Intake:
    """The tokens of one job as they come in; the writer's thread alone calls it."""

    def __init__(self, job: SubmitHeader) -> None:
        self._job = job
        self._digest = RunningDigest(job.spec.train.data_bytes)
        self._file: NewTokenFile | None = None

    def open(self, files: TokenFiles) -> None:
        """Write from now on; without it, tokens are only checked and digested."""
        self._file = files.begin(self._job.run_id, self._job.spec)

    def take(self, first: int, tokens: bytes) -> None:
        """Samples from `first` on."""
        _check_rows(self._job, first, tokens)
        self._digest.update(tokens)
        if self._file is not None:
            self._file.append(tokens)

    def digest(self) -> bytes:
        """Of all tokens, once they are here."""
        return self._digest.digest()

    def keep(self) -> None:
        """Make them durable."""
        if self._file is not None:
            self._file.keep()

    def discard(self) -> None:
        """Leave nothing behind that was not kept."""
        if self._file is not None:
            self._file.discard()


class _Incoming(Place):
    """A job that comes in, and may lose its place to another client's.

    Args:
        upload: what quotas count of it.
        begun_s: when it began, by the loop's clock.
    """

    def __init__(self, upload: Upload, begun_s: float) -> None:
        super().__init__(upload.owner, EVICTED)
        self.upload = upload
        self.begun_s = begun_s
        self.num_bytes = 0
        self.is_whole = False

    def bytes_per_s(self, now_s: float) -> float:
        """Its mean speed until now; over a second at least."""
        return self.num_bytes / max(1.0, now_s - self.begun_s)


class Submissions:
    """Makes every submission a run, once.

    Args:
        journal: where runs and their tokens are kept.
        known: the run of that name, if there is one.
        begin: told of a run that is new, with its tokens' digest, once these are on the disk.
        quotas: how much clients may submit.
        runs: all that are known.
        claims: the claim of a client, by its name.
        keeps_snapshots: whether this coordinator was told where they lie.
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
        # One thread: what it is asked first, it does first, even if nobody waits for it any more.
        self._writer = ThreadPoolExecutor(1, "tokens")
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def receive(self, stream: SubmitStream) -> RunId:
        """Take a job in and make it a run, unless it is one already.

        Cancelled after the last sample, it still goes on to its end.

        Raises:
            BadOption: the best weights are to be kept, and there is no place for snapshots.
            Busy: too many others are coming in, or all together have too much here.
            OverQuota: the client has as much here as it may have.
            RunMismatch: the client's digest of the RunSpec is not ours, or a run of that name has
                another spec, other data, or another owner.
            NotAllowed: the model's digests are another client's.
            BadDataset: samples are missing, too many, or no samples (`sample_rows.refusal`); or
                the job is larger than one may be.
            MalformedMessage: a field is out of its bounds.
            Unavailable: the client is gone, or sends nothing any more, or next to nothing.
            JournalFull: the disk has no room.
            JournalError: it refuses.
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
            await self._to_its_end(self._accept(job, intake, owner))
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
        # One that comes again makes no second run: it counts as nothing but a submission.
        runs = self._runs() if is_new else ()
        now_s = asyncio.get_running_loop().time()
        for evicted in self._in_the_way(upload, runs, who, now_s):
            self._incoming.remove(evicted)
            evicted.lose()
        incoming = _Incoming(upload, now_s)
        self._incoming.append(incoming)
        try:
            yield incoming
        finally:
            if incoming in self._incoming:
                self._incoming.remove(incoming)

    def _in_the_way(
        self, upload: Upload, runs: Collection[Run], who: str, now_s: float
    ) -> list[_Incoming]:
        """The fewest jobs that have to make room for this one; raises if none can."""
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

    async def _to_its_end(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the client that would be told may be gone


# ---- what comes in


class _Parts:
    """The parts of a job as they come in, in time.

    Args:
        stream: over which they come.
        bytes_per_s: the least speed.
    """

    def __init__(self, stream: SubmitStream, bytes_per_s: float) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self._floor = Floor(bytes_per_s=bytes_per_s, grace_s=PART_TIMEOUT_S, begun_s=now_s)
        self._num_bytes = 0
        self.incoming: _Incoming | None = None

    async def next(self) -> SubmitPart | None:
        """The next one; None at the end.

        Raises:
            Unavailable: it did not come in time.
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
            f"the {self._floor.bytes_per_s:g} bytes a second that are expected at least"
        )


def _slowest(incoming: Collection[_Incoming], owner: str, now_s: float) -> _Incoming | None:
    """The job that makes room for one of this owner: the slowest of the client with the most.

    None where no client has more, and no job came in long enough ago; or nobody has keys.
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
    """Samples from `first` on, about BATCH_BYTES of them; nothing at the end."""
    pieces: list[bytes] = []
    num_bytes = 0
    while num_bytes < BATCH_BYTES and (part := await parts.next()) is not None:
        pieces.append(_samples_of(part, job, first + num_bytes // job.spec.train.sample_bytes))
        num_bytes += len(pieces[-1])
    return b"".join(pieces)


def _samples_of(part: SubmitPart, job: SubmitHeader, expected: int) -> bytes:
    """Tokens of one or more samples in a row, of which the first must be the expected one."""
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
    """Whether a job that comes again is the one that the run is of, but for its data."""
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
        f"run {run_id}: is here already, with other options or other data; submit the job under "
        "another name"
    )
