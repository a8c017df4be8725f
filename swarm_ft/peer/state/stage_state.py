"""The state of a stage: weights, optimizer, buffers, residuals, side information, open step.

The number of committed steps always moves with the weights, whatever happens to the buffers:
missing buffers cost key frames, but a step that counts twice or not at all cannot be repaired. The
engine is used in the compute thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import ParamSpec

import torch
from safetensors import SafetensorError
from torch import Tensor

from swarm_ft.base import failpoints
from swarm_ft.base.log import get_logger
from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.codec import from_spec, pack_buffer, unpack_buffer
from swarm_ft.codec.base import CPU
from swarm_ft.codec.spec import CodecSpec, Direction
from swarm_ft.digest import fingerprint_of
from swarm_ft.errors import (
    BadFrame,
    BadInput,
    BadSnapshot,
    MalformedMessage,
    OutOfTurn,
    Unavailable,
)
from swarm_ft.ids import NO_ATTEMPT, Attempt, BlockIndex, RunId, SampleId, StepNumber
from swarm_ft.peer.boundary.side_info import SideInfoStore
from swarm_ft.peer.context import PeerContext, run_in
from swarm_ft.peer.reduce.gradient_coder import Residuals
from swarm_ft.peer.step import StepProgress
from swarm_ft.protocol.messages.control import CommitStep, HeldStage
from swarm_ft.protocol.messages.shard import ShardFile, ShardName
from swarm_ft.protocol.messages.timeline import SpanKind
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.snapshots.local_files import PLAIN, LocalFiles
from swarm_ft.snapshots.shard import SIDE_INFO, BufferName, ShardContents
from swarm_ft.stage.base import Engine
from swarm_ft.stage.model_access import refusal_of

# ---- compilation of all codecs of a run, before the first frame needs them
#
# Compilation takes seconds, on a machine's first run and after an update. A frame that waits for it
# delays all later stages.


def compile_codecs(spec: RunSpec, device: torch.device = CPU) -> None:
    """Compile all codecs of a run by encoding and decoding one sample with each."""
    train = spec.train
    _use_codec(train.reduction_codec, train.seq_length, spec.model.hidden_size, CPU)
    codecs = [train.fill_frame_codec, train.drain_frame_codec]
    if train.num_eval_samples and any(train.eval_passes):
        codecs.append(train.compressed_eval_codec)
    for way in Direction:
        codecs += [train.codec(way), train.key_frame_codec(way)]
    for codec in codecs:
        _use_codec(codec, train.seq_length, spec.model.hidden_size, device)
    if any(codec.is_delta or codec.has_residual for codec in codecs):
        _use_buffer(train.buffer_bits, train.seq_length, spec.model.hidden_size, device)


@lru_cache(maxsize=64)
def _use_codec(spec: CodecSpec, tokens: int, channels: int, device: torch.device) -> None:
    codec, x = from_spec(spec), _sample(tokens, channels, device)
    base = x / 2 if spec.is_delta else None
    tensor, _ = codec.encode_and_decode(x, base)
    codec.decode(tensor, base, device=device)


@lru_cache(maxsize=64)
def _use_buffer(bits: int, tokens: int, channels: int, device: torch.device) -> None:
    payload = pack_buffer(_sample(tokens, channels, device), bits)
    unpack_buffer(payload, tokens, channels, bits, device=device)


def _sample(tokens: int, channels: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, channels, generator=generator).to(device)


# ---- parts of a shard beside the weights: residuals, side information and buffers
#
# A shard contains the buffers only while they are few. Otherwise they stay on the peers' disks, and
# a run that rolls back to the snapshot continues with the buffers there, even newer ones.

logger = get_logger(__name__)

MAX_BUFFER_BYTES = 64 << 20
"""Bytes of all buffers in a shard; they are copied in memory while it is written."""
_BUFFERS = {
    End.SENT: "buffers/sent",
    End.RECEIVED: "buffers/received",
    End.RESIDUAL: "buffers/owed",
}
"""Name of the tensor with the payloads of an end's buffers, joined in the order of their names."""
_SIZES = "/sizes"
"""Suffix of the name of the tensor with each buffer's tokens and payload bytes."""
RESIDUALS = "residuals/"
"""Prefix of the names of residuals."""


def with_extras(
    state: Mapping[str, Tensor],
    store: BufferStore,
    residuals: Residuals,
    side_info: SideInfoStore,
) -> ShardContents:
    """Return weights and optimizer state together with copies of all other state.

    Reads the disk.
    """
    owed = {f"{RESIDUALS}{name}": x.clone() for name, x in residuals.export().items()}
    learned = {f"{SIDE_INFO}{name}": x for name, x in side_info.export().items()}
    records = _few_records(store)
    return ShardContents(
        state=dict(state),
        extras={**owed, **learned, **payloads(records)},
        buffer_digests={name: record.digest for name, record in records.items()},
    )


def _few_records(store: BufferStore) -> dict[BufferName, BufferRecord]:
    """Return all records of the store; none if they are more than `MAX_BUFFER_BYTES`."""
    found: dict[BufferName, BufferRecord] = {}
    num_records, num_bytes = len(store), 0
    for key, record in store.records():
        num_bytes += len(record.payload)
        # Most records have the same size: the first one predicts the total before all are read.
        if max(num_bytes, num_records * len(record.payload)) > MAX_BUFFER_BYTES:
            logger.info(
                "%d buffers are too many for a snapshot; they stay on this peer", num_records
            )
            return {}
        found[key.boundary, int(key.end), key.sample] = record
    return found


def restore_residuals(residuals: Residuals, contents: ShardContents) -> None:
    """Restore the residuals of a shard.

    Raises:
        BadSnapshot: The tensors are no residuals.
    """
    tensors = {
        name.removeprefix(RESIDUALS): x
        for name, x in contents.extras.items()
        if name.startswith(RESIDUALS)
    }
    try:
        residuals.restore(tensors)
    except MalformedMessage as error:
        raise BadSnapshot(f"{error.message}; start a new run") from error


def restore_side_info(side_info: SideInfoStore, channels: int, contents: ShardContents) -> None:
    """Restore the side information of a shard.

    Raises:
        BadSnapshot: The tensors are no side information for this number of channels.
    """
    known = {
        name.removeprefix(SIDE_INFO): x
        for name, x in contents.extras.items()
        if name.startswith(SIDE_INFO)
    }
    try:
        side_info.restore(known, channels)
    except BadFrame as error:
        raise BadSnapshot(f"{error.message}; start a new run") from error


def restore_buffers(
    store: BufferStore, run_id: RunId, channels: int, contents: ShardContents
) -> None:
    """Restore the buffers of a shard, [tokens, channels] each, whose payloads fit their digests.

    They replace all other buffers. If the shard has no buffers, those in the store stay; an older
    or newer one costs a key frame at most.
    """
    if not contents.buffer_digests:
        return
    store.forget()
    for name, record in buffers_in(contents, channels):
        boundary, end, sample = name
        store.put(BufferKey(run_id, BlockIndex(boundary), End(end), SampleId(sample)), record)


def buffers_in(contents: ShardContents, channels: int) -> Iterator[tuple[BufferName, BufferRecord]]:
    """Yield the buffers of a shard whose payloads fit their digests."""
    for end in End:
        names = sorted(name for name in contents.buffer_digests if name[1] == end)
        for name, (tokens, payload) in zip(names, _payloads_of(contents, end), strict=False):
            digest = contents.buffer_digests[name]
            if fingerprint_of(payload) == digest:
                yield name, BufferRecord(digest, tokens, channels, payload)


def _payloads_of(contents: ShardContents, end: End) -> Iterator[tuple[int, bytes]]:
    """Yield tokens and payload of each complete buffer of an end; see `payloads`."""
    payloads = contents.extras.get(_BUFFERS[end], torch.empty(0, dtype=torch.uint8))
    sizes = contents.extras.get(f"{_BUFFERS[end]}{_SIZES}", torch.empty(0, 2, dtype=torch.int64))
    if payloads.dtype != torch.uint8 or sizes.dtype != torch.int64 or sizes.shape[1:] != (2,):
        return
    data, at = payloads.numpy().tobytes(), 0
    for tokens, num_bytes in sizes.tolist():
        if num_bytes < 0 or at + num_bytes > len(data):
            return
        yield tokens, data[at : at + num_bytes]
        at += num_bytes


def payloads(records: Mapping[BufferName, BufferRecord]) -> dict[str, Tensor]:
    """Return two tensors for each end with buffers, by name.

    One has the payloads of all buffers, uint8 [bytes]. The other has the tokens and payload bytes
    of each buffer, int64 [buffers, 2].
    """
    found: dict[str, Tensor] = {}
    for end, tensor in _BUFFERS.items():
        of_end = [records[name] for name in sorted(records) if name[1] == end]
        if of_end:
            joined = bytearray().join(record.payload for record in of_end)
            found[tensor] = torch.frombuffer(joined, dtype=torch.uint8)
            found[f"{tensor}{_SIZES}"] = torch.tensor(
                [(record.tokens, len(record.payload)) for record in of_end], dtype=torch.int64
            )
    return found


P = ParamSpec("P")
EngineMaker = Callable[[RunSpec, LayerRange], Engine]


class StageState:
    """The state of a stage; see the module.

    Args:
        context: Context of the run.
        run_id: Id of the run.
        spec: Spec of the run.
        make_engine: Creates an engine for this peer's device, not loaded yet.
        store: Buffers of the run, possibly from an earlier start; None creates a store in memory.
        files: Writes and reads the run's other files on this disk.

    Attributes:
        context: Context of the run.
        store: Buffers at this stage's ends of its boundaries.
        residuals: Residuals of this stage's gradients.
        side_info: Side information of this stage's frames.
        committed_steps: Number of steps in the state.
        last_attempt: Attempt that committed the last of them.
        gradient_attempt: Attempt whose complete gradients the engine holds; None if it holds none.
        progress: Progress of the open step in the engine; None if the step begins anew.
        limits_microbatches: Whether memory ran out, so that the stage holds no more microbatches
            than plain 1F1B does.
        outdated_buffers: Buffers to drop when the open step commits: their samples pass another
            replica in it, which then has newer ones.
    """

    def __init__(
        self,
        context: PeerContext,
        run_id: RunId,
        spec: RunSpec,
        make_engine: EngineMaker,
        store: BufferStore | None = None,
        files: LocalFiles = PLAIN,
    ) -> None:
        self.context = self._context = context
        self._run_id = run_id
        self._spec = spec
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._change_lock = asyncio.Lock()
        self.store = store if store is not None else BufferStore()
        self.files = files
        self._reset()

    def _reset(self) -> None:
        self.residuals = Residuals()
        self.side_info = SideInfoStore()
        self.committed_steps, self.last_attempt = 0, NO_ATTEMPT
        self.gradient_attempt: Attempt | None = None
        self.progress: StepProgress | None = None
        self.limits_microbatches = False
        self.outdated_buffers: tuple[BufferKey, ...] = ()

    @property
    def run_id(self) -> RunId:
        """Id of the run."""
        return self._run_id

    @property
    def is_loaded(self) -> bool:
        """Whether weights are loaded."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """Engine with the weights.

        Raises:
            OutOfTurn: Nothing is loaded.
        """
        if self._engine is None:
            raise OutOfTurn(f"run {self._run_id}: nothing is loaded")
        return self._engine

    @property
    def name(self) -> ShardName:
        """Name of the present state.

        Raises:
            OutOfTurn: Nothing is loaded.
        """
        step = StepNumber(self.committed_steps)
        return ShardName(run_id=self._run_id, step=step, layers=self.engine.layers)

    def reported_state(self, exported: ShardFile | None) -> HeldStage | None:
        """Return the state to report in a hello; None if nothing is loaded."""
        if self._engine is None:
            return None
        return HeldStage(
            run_id=self._run_id,
            spec_digest=self._spec.digest(),
            layers=self._engine.layers,
            committed_steps=self.committed_steps,
            last_attempt=self.last_attempt,
            exported=exported,
        )

    async def load(self, layers: LayerRange, *, is_beginning: bool = True) -> None:
        """Load the stage as of the run's beginning.

        Args:
            layers: Layers of the stage.
            is_beginning: Whether the run begins (again), so that buffers of an earlier try are
                deleted.
        """
        await self.wait_idle()
        self.drop()
        if is_beginning:
            await asyncio.to_thread(self.store.forget)
        await self.prepare(layers)

    async def prepare(self, layers: LayerRange) -> None:
        """Load weights if there are none; buffers and residuals stay as they are.

        `load` does the same after it dropped all other state.
        """
        async with self._change_lock:
            if self._engine is None:
                await run_in(
                    self._context.codecs, compile_codecs, self._spec, self._context.codec_device
                )
                self._engine = await self._load_engine(layers)
                logger.info("run %s: loaded layers %s", self._run_id, layers)

    async def _load_engine(self, layers: LayerRange) -> Engine:
        """Return an engine with loaded weights.

        Raises:
            BadInput: This peer cannot host the stage; the message may be shown to a client.
        """
        try:
            engine = await run_in(self._context.compute, self._make_engine, self._spec, layers)
            await run_in(self._context.compute, engine.load)
        except BadInput as error:
            raise refusal_of(error) from error
        return engine

    def drop(self) -> None:
        """Drop all state except buffers, which digests protect from wrong use."""
        self._engine = None
        self._reset()
        self.store.rollback()

    async def release(self) -> None:
        """Drop all state and delete its files."""
        self.drop()
        await asyncio.to_thread(self.store.forget)
        await asyncio.to_thread(self.store.close)

    async def wait_idle(self) -> None:
        """Wait for a change under way, which continues even if its caller was cancelled."""
        async with self._change_lock:
            pass

    async def commit(self, commit: CommitStep) -> None:
        """Apply the step's gradients, once. A cancelled call still runs to its end.

        Raises:
            OutOfTurn: The step is not the next one, or its gradients are not here.
        """
        await asyncio.shield(self._commit(commit))

    async def _commit(self, commit: CommitStep) -> None:
        async with self._change_lock:
            if commit.step < self.committed_steps:
                return
            self._check_turn(commit)
            failpoints.reached("commit-heard")
            apply = self._context.timeline.timed(SpanKind.OPTIMIZER, self.engine.apply)
            await self._applied(apply, commit.clip_factor, commit.learning_rate)
            self.committed_steps += 1
            self.last_attempt = commit.attempt
            self.progress = None
            self.residuals.commit()
            if self.side_info.has_changes:
                await run_in(self._context.codecs, self.side_info.commit)
            await self._commit_buffers(commit.step)
            # The next side information is computed meanwhile; the step's last frame waits for it.
            self._context.codecs.submit(self.side_info.learn)

    async def _applied(self, apply: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Change the weights. A failure may leave half of the change, so that all state is dropped.

        Raises:
            Exception: Any error of `apply`.
        """
        try:
            await run_in(self._context.compute, apply, *args, **kwargs)
        except Exception:
            self.drop()
            raise

    async def _commit_buffers(self, step: StepNumber) -> None:
        """Commit the step's buffers. After a failure they are lost, which key frames repair."""
        try:
            # The first step of an epoch takes longer: it computes the order of the next epoch.
            await run_in(self._context.codecs, self.store.commit, step)
        except Exception:
            logger.exception("run %s: the buffers of step %d are lost", self._run_id, step)
            self.store.lose_staged()
        self.store.drop(self.outdated_buffers)

    async def apply_sum(self, commit: CommitStep, total: Tensor) -> None:
        """Apply the sum of a step that the other replicas computed, once.

        A cancelled call still runs to its end.

        Args:
            commit: Commit of the step.
            total: Sum of the replicas' gradients, float32 [n].

        Raises:
            OutOfTurn: The step is not the next one.
        """
        await asyncio.shield(self._apply_sum(commit, total))

    async def _apply_sum(self, commit: CommitStep, total: Tensor) -> None:
        async with self._change_lock:
            if commit.step < self.committed_steps:
                return
            if commit.step > self.committed_steps:
                raise OutOfTurn(
                    f"expected the sum of step {self.committed_steps}, got {commit.step}"
                )
            numbers = commit.clip_factor, commit.learning_rate
            await self._applied(self.engine.apply_sum, commit.step, total, *numbers)
            self.committed_steps += 1
            self.last_attempt = commit.attempt

    def _check_turn(self, commit: CommitStep) -> None:
        if commit.step > self.committed_steps or self._engine is None:
            raise OutOfTurn(f"expected a commit of step {self.committed_steps}, got {commit.step}")
        if commit.attempt != self.gradient_attempt:
            present = (
                "none" if self.gradient_attempt is None else f"attempt {self.gradient_attempt}"
            )
            raise OutOfTurn(
                f"commit of step {commit.step}: expected gradients of attempt {commit.attempt} "
                f"here, got {present}"
            )

    async def begin_step(self, step: StepNumber, num_targets: int) -> StepProgress:
        """Begin the next step, without traces of an earlier try."""
        self.progress = self.gradient_attempt = None
        begin = self._context.timeline.timed(SpanKind.GRADIENT, self.engine.begin_step)
        await run_in(self._context.compute, begin, step, num_targets)
        self.store.rollback()
        self.residuals.rollback()
        self.side_info.rollback()
        self.progress = StepProgress(step)
        return self.progress

    def begin_evaluation(self, step: StepNumber) -> StepProgress:
        """Begin to evaluate the weights after the last step; no step is open meanwhile."""
        self.progress = StepProgress(step)
        return self.progress

    async def resume_step(self, progress: StepProgress) -> StepProgress:
        """Resume the open step at the progress of an earlier attempt.

        Raises:
            OutOfTurn: The engine does not hold that progress.
        """
        self.progress = self.gradient_attempt = None
        counted = frozenset(progress.done)
        await run_in(
            self._context.compute,
            self.engine.resume_step,
            progress.step,
            counted,
            progress.gradient,
        )
        self.store.rollback(but=progress.samples)
        self.residuals.rollback()
        self.side_info.rollback(but=progress.samples)
        # The engine holds this gradient again, and adds to its own copy from now on.
        progress.gradient = None
        self.progress = progress
        return progress

    async def export(self, path: Path) -> None:
        """Write the trained weights to a file.

        Raises:
            OutOfTurn: Nothing is loaded.
            Unavailable: The disk refuses the file (now).
        """
        try:
            await run_in(self._context.compute, self._write_result, path)
        except (OSError, SafetensorError) as error:
            raise Unavailable(f"{path} cannot be written: {error}") from error

    def _write_result(self, path: Path) -> None:
        self.files.write_pieces(path, self.engine.export())

    # ---- as tensors

    async def weights(self) -> ShardContents:
        """Return copies of weights and optimizer state, which are equal at all replicas.

        Raises:
            OutOfTurn: Nothing is loaded.
        """
        return ShardContents(state=await run_in(self._context.compute, self.engine.state))

    async def full_state(self) -> ShardContents:
        """Return copies of all state at this peer that determines the next steps.

        Raises:
            OutOfTurn: Nothing is loaded.
        """
        await self.wait_idle()  # weights are counted before their buffers are committed
        state = await run_in(self._context.compute, self.engine.state)
        kept = self.store, self.residuals, self.side_info
        return await run_in(self._context.codecs, with_extras, state, *kept)

    async def restore(self, contents: ShardContents, step: int, attempt: Attempt) -> None:
        """Restore the contents that `weights` or `full_state` returned for the same layers.

        Only `load` or `prepare` may precede this call. A cancelled call still runs to its end.

        Args:
            contents: Contents of the other peer's state.
            step: Number of steps in the state.
            attempt: Attempt that committed the last of them.

        Raises:
            BadSnapshot: The contents do not fit this stage.
            OutOfTurn: Nothing is loaded.
        """
        await asyncio.shield(self._restore(contents, step, attempt))

    async def _restore(self, contents: ShardContents, step: int, attempt: Attempt) -> None:
        async with self._change_lock:
            layers = self.engine.layers
            await run_in(self._context.compute, self.engine.load_state, contents.state)
            self.committed_steps, self.last_attempt = step, attempt
            channels = self._spec.model.hidden_size
            restore_residuals(self.residuals, contents)
            codecs = self._context.codecs
            await run_in(codecs, restore_side_info, self.side_info, channels, contents)
            await run_in(codecs, restore_buffers, self.store, self._run_id, channels, contents)
        logger.info("run %s: restored layers %s at step %d", self._run_id, layers, step)
