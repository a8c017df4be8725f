"""A newcomer comes by its stage's state while the other replicas train on.

It listens from the first step that the state lacks: the sum of every committed step waits in a
backlog. Once the state is there the backlog is applied, as fast as this peer can; when it is empty
the newcomer has the bits that all replicas have, and says so.
"""

from __future__ import annotations

import asyncio
import io
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.errors import BadSnapshot, OutOfTurn, Unavailable
from swarm_ft.ids import Attempt, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.peer.context import PeerContext, run_in
from swarm_ft.peer.reduce.gradient_coder import EncodedSum
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.messages.control import Assign, CatchUp, CaughtUp, CommitStep
from swarm_ft.protocol.messages.shard import ShardFile, ShardName, proof_by
from swarm_ft.protocol.spec.digest import file_stem
from swarm_ft.snapshots.local_files import PLAIN, LocalFiles
from swarm_ft.snapshots.shard import ShardContents, read_shard
from swarm_ft.transfer import Downloader

# ---- committed steps that wait to be applied: what replicas summed, and how it is to be applied
#
# A newcomer fills it while it fetches its stage's state. Sums wait as they were encoded, in
# memory up to a bound and in files beyond it.

MAX_MEMORY_BYTES = 256 << 20
"""Of all sums together that are not in files."""


@dataclass(frozen=True, slots=True)
class _InFile:
    """A sum in a file: how many values and bytes each piece has."""

    path: Path
    sizes: tuple[tuple[int, int], ...]


class Backlog:
    """First in, first out.

    Args:
        folder: where files may lie.
        name: that their names begin with; no other backlog's there.
        memory_bytes: of sums that may be in memory.
        files: how they are written.
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
        """A step was committed.

        Raises:
            Unavailable: the disk does not take its sum.
        """
        held = sum(kept.num_bytes for _, kept in self._steps if isinstance(kept, EncodedSum))
        if held + total.num_bytes <= self._memory_bytes:
            self._steps.append((commit, total))
            return
        path = self._folder / f"{self._name}-{commit.step}.sum"
        self._steps.append((commit, await asyncio.to_thread(_write, self._files, path, total)))

    async def first(self) -> tuple[CommitStep, EncodedSum] | None:
        """The oldest step, which stays until it is dropped; None if there is none.

        Raises:
            Unavailable: its file cannot be read.
        """
        if not self._steps:
            return None
        commit, kept = self._steps[0]
        if isinstance(kept, _InFile):
            kept = await asyncio.to_thread(_read, self._files, kept)
        return commit, kept

    def drop_first(self) -> None:
        """The oldest step is applied."""
        _, kept = self._steps.popleft()
        if isinstance(kept, _InFile):
            kept.path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Nobody will apply what is there."""
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


def _read(files: LocalFiles, kept: _InFile) -> EncodedSum:
    try:
        file = io.BytesIO(files.read(kept.path))
        return EncodedSum(
            tuple(
                (count, EncodedTensor.from_bytes(file.read(num_bytes)))
                for count, num_bytes in kept.sizes
            )
        )
    except (OSError, BadSnapshot) as error:
        raise Unavailable(f"{kept.path} cannot be read: {error}") from error


logger = get_logger(__name__)

FETCH_TRIES = 3
RETRY_S = 2.0
"""Rest after a try; what came is kept."""


class CatchingUp:
    """See the module's docstring. Outlives attempts; `expect` and `run` in each of them.

    Args:
        state: what is to become the stage; what is in it is dropped.
        folder: for files that lie there only meanwhile.
        name: of the state that sources offer.
        assign: the assignment that asks for it; as many steps are committed in it.

    Attributes:
        has_caught_up: whether this peer has all committed steps, and applies each as it comes.
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
        self._last_attempt = self._heard_attempt = assign.last_attempt
        self._heard_steps = assign.committed_steps
        self._codec = PieceCodec(assign.spec.train.reduction_codec)
        self._backlog = Backlog(
            folder, f"heard-{file_stem(name.run_id)}-{name.layers}", files=state.files
        )
        self._open: tuple[Attempt, StepNumber, EncodedSum] | None = None
        self._contents: ShardContents | None = None
        self._state_bytes, self._proof = 0, b""
        self._one_at_a_time = asyncio.Lock()
        self.expect(assign.attempt)

    def goes_on_with(self, assign: Assign, name: ShardName) -> bool:
        """Whether an assignment asks for this state, and all steps since were heard here."""
        mine = (self.name, self._heard_steps, self._heard_attempt)
        return mine == (name, assign.committed_steps, assign.last_attempt)

    def expect(self, attempt: Attempt) -> None:
        """From now on only this attempt's `CatchUp` and sums count."""
        self._attempt = attempt
        self._open = None
        self._take: asyncio.Future[CatchUp] = asyncio.get_running_loop().create_future()

    def take(self, take: CatchUp) -> None:
        """The state is there to be fetched."""
        if take.attempt == self._attempt and not self._take.done():
            self._take.set_result(take)

    # ---- the state

    async def run(self) -> None:
        """Fetch the state, apply what was heard meanwhile, and say so; goes on after a cancel.

        Raises:
            ExceptionGroup: of Unavailable, if nobody who has the state gives it (now); of
                BadSnapshot, if what came is not that state.
            Unavailable: the disk does not give back what was heard.
        """
        await self._state.at_rest()
        if self._state.committed_steps < self.name.step:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._state.prepare(self.name.layers))
                group.create_task(self._fetch())
            await self._become()
        await self._apply_all()
        self.has_caught_up = True
        await self._take  # until sources told in this attempt too, nobody could check the proof
        caught_up = CaughtUp(
            run_id=self.name.run_id,
            attempt=self._attempt,
            state_bytes=self._state_bytes,
            proof=self._proof,
        )
        self._context.say(caught_up)

    async def _fetch(self) -> None:
        if self._contents is not None:
            return
        take = await self._take
        for _ in range(FETCH_TRIES - 1):  # to fail costs everybody an attempt
            try:
                await self._fetch_from(take)
            except Unavailable as error:
                logger.warning("%s: is tried again: %s", self.name, error.message)
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
            path.unlink(missing_ok=True)  # what was read stays mapped until it is let go of

    async def _become(self) -> None:
        contents, self._contents = self._contents, None
        if contents is not None:
            await self._state.restore(contents, self.name.step, self._last_attempt)

    async def _apply_all(self) -> None:
        async with self._one_at_a_time:
            while (kept := await self._backlog.first()) is not None:
                commit, total = kept
                values = await run_in(self._context.codecs, total.decoded, self._codec)
                await self._state.apply_sum(commit, values)
                self._backlog.drop_first()

    def close(self) -> None:
        """Nobody will apply what was heard."""
        self._backlog.clear()

    # ---- steps

    def summed(self, attempt: Attempt, step: StepNumber, total: EncodedSum) -> None:
        """The sum of the step under way is here; whether it counts is for its commit to say."""
        self._open = attempt, step, total

    def expects(self, commit: CommitStep) -> bool:
        """Whether this is the commit of a step that was listened to."""
        return self._open is not None and self._open[:2] == (commit.attempt, commit.step)

    async def commit(self, commit: CommitStep) -> None:
        """The step that was listened to counts.

        Raises:
            OutOfTurn: it is another step than the one whose sum is here.
            Unavailable: the disk does not take its sum.
        """
        if self._open is None or not self.expects(commit):
            raise OutOfTurn(f"commit of step {commit.step}, {self._heard_steps} were heard")
        total, self._open = self._open[2], None
        await self._backlog.append(commit, total)
        self._heard_steps, self._heard_attempt = commit.step + 1, commit.attempt
        if self.has_caught_up:
            await self._apply_all()
