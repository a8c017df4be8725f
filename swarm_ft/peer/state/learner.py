"""Transfer of a stage's state to a learner while the other replicas continue to train.

The learner receives the sum of every step from the first one that the state lacks, and stores it in
a backlog. Once the state has arrived, the learner applies the backlog. When it is empty, the
learner has the same bits as all replicas, and reports that.
"""

from __future__ import annotations

import asyncio
import io
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarm_ft.base.log import get_logger
from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.digest import file_stem
from swarm_ft.errors import BadSnapshot, OutOfTurn, Unavailable
from swarm_ft.ids import Attempt, StepNumber
from swarm_ft.net.transfer import Downloader
from swarm_ft.peer.context import PeerContext, run_in
from swarm_ft.peer.reduce.gradient_coder import EncodedSum
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.protocol.messages.control import Assign, CatchUp, CaughtUp, CommitStep
from swarm_ft.protocol.messages.shard import ShardFile, ShardName, proof_by
from swarm_ft.snapshots.local_files import PLAIN, LocalFiles
from swarm_ft.snapshots.shard import ShardContents, read_shard

# ---- the backlog: sums of committed steps that wait until the learner has the state

MAX_MEMORY_BYTES = 256 << 20
"""Bytes of all sums in memory; further sums are written to files."""


@dataclass(frozen=True, slots=True)
class _InFile:
    """A sum in a file, with the number of values and bytes of each piece."""

    path: Path
    sizes: tuple[tuple[int, int], ...]


class Backlog:
    """A queue of committed steps and their sums, encoded, in memory and in files.

    Args:
        folder: Directory for files.
        name: Prefix of the files' names, different from that of any other backlog there.
        memory_bytes: Bytes of sums in memory.
        files: Writes and reads the files.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        memory_bytes: int = MAX_MEMORY_BYTES,
        files: LocalFiles = PLAIN,
    ) -> None:
        self._folder = folder
        self._name = name
        self._memory_bytes = memory_bytes
        self._files = files
        self._steps: deque[tuple[CommitStep, EncodedSum | _InFile]] = deque()

    async def append(self, commit: CommitStep, total: EncodedSum) -> None:
        """Add a committed step.

        Raises:
            Unavailable: The disk refuses the file.
        """
        memory_used = sum(
            stored.num_bytes for _, stored in self._steps if isinstance(stored, EncodedSum)
        )
        if memory_used + total.num_bytes <= self._memory_bytes:
            self._steps.append((commit, total))
            return
        path = self._folder / f"{self._name}-{commit.step}.sum"
        self._steps.append((commit, await asyncio.to_thread(_write, self._files, path, total)))

    async def first(self) -> tuple[CommitStep, EncodedSum] | None:
        """Return the oldest step, which stays until `drop_first`; None if there is none.

        Raises:
            Unavailable: The file of the sum cannot be read.
        """
        if not self._steps:
            return None
        commit, stored = self._steps[0]
        if isinstance(stored, _InFile):
            stored = await asyncio.to_thread(_read, self._files, stored)
        return commit, stored

    def drop_first(self) -> None:
        """Remove the oldest step, which has been applied."""
        _, stored = self._steps.popleft()
        if isinstance(stored, _InFile):
            stored.path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all steps."""
        while self._steps:
            self.drop_first()


def _write(files: LocalFiles, path: Path, total: EncodedSum) -> _InFile:
    pieces = [(count, tensor.to_bytes()) for count, tensor in total.pieces]
    try:
        files.write_pieces(path, (data for _, data in pieces))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise Unavailable(f"{path} cannot be written: {error}") from error
    return _InFile(path, tuple((count, len(data)) for count, data in pieces))


def _read(files: LocalFiles, stored: _InFile) -> EncodedSum:
    try:
        file = io.BytesIO(files.read(stored.path))
        return EncodedSum(
            tuple(
                (count, EncodedTensor.from_bytes(file.read(num_bytes)))
                for count, num_bytes in stored.sizes
            )
        )
    except (OSError, BadSnapshot) as error:
        raise Unavailable(f"{stored.path} cannot be read: {error}") from error


logger = get_logger(__name__)

FETCH_TRIES = 3
RETRY_S = 2.0
"""Seconds between tries; chunks that arrived are kept."""


class CatchUpTransfer:
    """The transfer of a state to this peer; see the module.

    It outlives attempts; each of them calls `expect` and `run`.

    Args:
        context: Context of the run.
        state: State that is replaced; its content is dropped.
        folder: Directory for temporary files.
        name: Name of the state that sources offer.
        assign: Assignment that requests the transfer, at as many committed steps as the state.

    Attributes:
        has_caught_up: Whether this peer has all committed steps and applies each one at once.
    """

    def __init__(
        self,
        context: PeerContext,
        state: StageState,
        folder: Path,
        name: ShardName,
        assign: Assign,
    ) -> None:
        state.drop()
        self.name = name
        self.has_caught_up = False
        self._context = context
        self._state = state
        self._folder = folder
        self._files = state.files
        self._downloader = Downloader(context.directory, context.transport, files=state.files)
        self._spec_digest = assign.spec_digest
        self._last_attempt = self._received_attempt = assign.last_attempt
        self._received_steps = assign.committed_steps
        self._codec = PieceCodec(assign.spec.train.reduction_codec)
        self._backlog = Backlog(
            folder, f"heard-{file_stem(name.run_id)}-{name.layers}", files=state.files
        )
        self._open: tuple[Attempt, StepNumber, EncodedSum] | None = None
        self._contents: ShardContents | None = None
        self._state_bytes, self._proof = 0, b""
        self._one_at_a_time = asyncio.Lock()
        self.begin_attempt(assign.attempt)

    def can_resume(self, assign: Assign, name: ShardName) -> bool:
        """Whether an assignment requests this state, and no sum since was missed."""
        mine = (self.name, self._received_steps, self._received_attempt)
        return mine == (name, assign.committed_steps, assign.last_attempt)

    def begin_attempt(self, attempt: Attempt) -> None:
        """Accept only `CatchUp` messages and sums of this attempt from now on."""
        self._attempt = attempt
        self._open = None
        self._take: asyncio.Future[CatchUp] = asyncio.get_running_loop().create_future()

    def start_fetch(self, take: CatchUp) -> None:
        """Begin to fetch the state."""
        if take.attempt == self._attempt and not self._take.done():
            self._take.set_result(take)

    # ---- the state

    async def run(self) -> None:
        """Fetch the state, apply the backlog and report that; a cancelled call can be continued.

        Raises:
            ExceptionGroup: `Unavailable` if no source provides the state (now); `BadSnapshot` if a
                file does not contain it.
            Unavailable: The disk cannot return the backlog.
        """
        await self._state.wait_idle()
        if self._state.committed_steps < self.name.step:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._state.prepare(self.name.layers))
                group.create_task(self._fetch())
            await self._install_state()
        await self._apply_all()
        self.has_caught_up = True
        await self._take  # before the sources of this attempt reported, the proof has no match
        caught_up = CaughtUp(
            run_id=self.name.run_id,
            attempt=self._attempt,
            state_bytes=self._state_bytes,
            proof=self._proof,
        )
        self._context.send_to_coordinator(caught_up)

    async def _fetch(self) -> None:
        if self._contents is not None:
            return
        take = await self._take
        for _ in range(FETCH_TRIES - 1):  # a failure would cost all peers an attempt
            try:
                await self._fetch_from(take)
            except Unavailable as error:
                logger.warning("%s: trying again: %s", self.name, error.message)
                await asyncio.sleep(RETRY_S)
            else:
                return
        await self._fetch_from(take)

    async def _fetch_from(self, take: CatchUp) -> None:
        name, sources = self.name, take.sources
        path = self._folder / f"handed-{file_stem(name.run_id)}-{name.layers}.safetensors"
        try:
            file = ShardFile(digest=take.digest, total_bytes=take.total_bytes)
            chunks = await self._downloader.list_chunks(name, file, sources)
            brought = await self._downloader.download(name, chunks, sources, path)
            proof = proof_by(self._context.peer_id, name)
            await asyncio.to_thread(self._files.list_chunks, path, proof)
            read = partial(read_shard, path, name, self._spec_digest, self._files)
            contents = await asyncio.to_thread(read)
            self._contents, self._state_bytes = contents, sum(brought.values())
            self._proof = proof.digest()
        finally:
            path.unlink(missing_ok=True)  # the tensors stay mapped until they are freed

    async def _install_state(self) -> None:
        contents, self._contents = self._contents, None
        if contents is not None:
            await self._state.restore(contents, self.name.step, self._last_attempt)

    async def _apply_all(self) -> None:
        async with self._one_at_a_time:
            while (stored := await self._backlog.first()) is not None:
                commit, total = stored
                values = await run_in(self._context.codecs, total.decoded, self._codec)
                await self._state.apply_sum(commit, values)
                self._backlog.drop_first()

    def close(self) -> None:
        """Delete the backlog."""
        self._backlog.clear()

    # ---- steps

    def store_sum(self, attempt: Attempt, step: StepNumber, total: EncodedSum) -> None:
        """Store the sum of the step under way until its commit."""
        self._open = attempt, step, total

    def awaits_commit(self, commit: CommitStep) -> bool:
        """Whether a commit is of the step whose sum is stored."""
        return self._open is not None and self._open[:2] == (commit.attempt, commit.step)

    async def commit(self, commit: CommitStep) -> None:
        """Commit the step whose sum is stored.

        Raises:
            OutOfTurn: The commit is of another step.
            Unavailable: The disk refuses the sum.
        """
        if self._open is None or not self.awaits_commit(commit):
            raise OutOfTurn(
                f"commit of step {commit.step}, sums of {self._received_steps} steps are here"
            )
        total, self._open = self._open[2], None
        await self._backlog.append(commit, total)
        self._received_steps, self._received_attempt = commit.step + 1, commit.attempt
        if self.has_caught_up:
            await self._apply_all()
