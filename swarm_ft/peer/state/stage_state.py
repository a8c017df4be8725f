"""All that a stage at this peer consists of: weights and optimizer, buffers, residuals, its step.

What steps are counted by moves with the weights, whatever becomes of the buffers: without these
the next frames are key frames, but a step that is counted twice or not at all is never mended. The
engine is touched in the compute thread only.
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

from swarm_ft import failpoints
from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.codec import from_spec, pack_buffer, unpack_buffer
from swarm_ft.codec.base import CPU
from swarm_ft.errors import (
    BadFrame,
    BadInput,
    BadSnapshot,
    MalformedMessage,
    OutOfTurn,
    Unavailable,
)
from swarm_ft.ids import NO_ATTEMPT, Attempt, BlockIndex, RunId, SampleId, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.peer.boundary.bases import Bases
from swarm_ft.peer.context import PeerContext, run_in
from swarm_ft.peer.reduce.gradient_coder import Residuals
from swarm_ft.peer.step import StepProgress
from swarm_ft.protocol.messages.control import CommitStep, HeldStage
from swarm_ft.protocol.messages.shard import ShardFile, ShardName
from swarm_ft.protocol.messages.timeline import SpanKind
from swarm_ft.protocol.spec.codec_spec import CodecSpec, Direction
from swarm_ft.protocol.spec.digest import fingerprint_of
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.snapshots.local_files import PLAIN, LocalFiles
from swarm_ft.snapshots.shard import BufferName, ShardContents
from swarm_ft.stage.base import Engine
from swarm_ft.stage.model_access import refusal_of

# ---- machine code for all of a run's codecs, before the first frame needs it
#
# Compiling takes seconds, on a machine's first run and after an update; a frame that waits for it
# holds up every stage behind this one.


def compile_codecs(spec: RunSpec, device: torch.device = CPU) -> None:
    """Encode and decode a sample by each codec of the run, as frames on that device will be."""
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


# ---- what a stage keeps beside its weights, as parts of a shard: residuals and buffers
#
# A shard holds the buffers as long as they are few. Large sets stay where they are, on the peers'
# disks: who goes back to the snapshot goes on with what is there by then, newer ones too.

logger = get_logger(__name__)

MAX_BUFFER_BYTES = 64 << 20
"""Of all buffers in a shard; they are copied in memory while it is written."""
_BUFFERS = {
    End.SENT: "buffers/sent",
    End.RECEIVED: "buffers/received",
    End.RESIDUAL: "buffers/owed",
}
"""The tensors that hold the payloads of all buffers of an end, one behind the other in the order of
their names."""
_SIZES = "/sizes"
"""Behind the name of such a tensor: that of each buffer's tokens and of its payload's bytes."""
RESIDUALS = "residuals/"
"""What the names of residuals begin with."""
BASES = "bases/"
"""What the names of bases begin with."""


def with_extras(
    state: Mapping[str, Tensor], store: BufferStore, residuals: Residuals, bases: Bases
) -> ShardContents:
    """Weights and optimizer together with copies of all else. Waits for the disk."""
    owed = {f"{RESIDUALS}{name}": x.clone() for name, x in residuals.export().items()}
    along = {f"{BASES}{name}": x for name, x in bases.export().items()}
    records = _few_records(store)
    return ShardContents(
        state=dict(state),
        extras={**owed, **along, **payloads(records)},
        buffer_digests={name: record.digest for name, record in records.items()},
    )


def _few_records(store: BufferStore) -> dict[BufferName, BufferRecord]:
    """All records, or none if they are too many."""
    found: dict[BufferName, BufferRecord] = {}
    num_records, num_bytes = len(store), 0
    for key, record in store.records():
        num_bytes += len(record.payload)
        # Most have one size: the first tells what reading them all would come to.
        if max(num_bytes, num_records * len(record.payload)) > MAX_BUFFER_BYTES:
            logger.info("%d buffers are too many for a snapshot; they stay here", num_records)
            return {}
        found[key.boundary, int(key.end), key.sample] = record
    return found


def restore_residuals(residuals: Residuals, contents: ShardContents) -> None:
    """Take the residuals of `with_extras`.

    Raises:
        BadSnapshot: they are none.
    """
    owed = {
        name.removeprefix(RESIDUALS): x
        for name, x in contents.extras.items()
        if name.startswith(RESIDUALS)
    }
    try:
        residuals.restore(owed)
    except MalformedMessage as error:
        raise BadSnapshot(f"{error.message}; begin anew") from error


def restore_bases(bases: Bases, channels: int, contents: ShardContents) -> None:
    """Take the bases of `with_extras`, of so many channels.

    Raises:
        BadSnapshot: they are none.
    """
    known = {
        name.removeprefix(BASES): x for name, x in contents.extras.items() if name.startswith(BASES)
    }
    try:
        bases.restore(known, channels)
    except BadFrame as error:
        raise BadSnapshot(f"{error.message}; begin anew") from error


def restore_buffers(
    store: BufferStore, run_id: RunId, channels: int, contents: ShardContents
) -> None:
    """Take the buffers, [tokens, channels] each, whose payloads are those of their digests.

    There are then no others. If the shard has none, those that are here stay, older and newer ones
    too: each costs a key frame at most.
    """
    if not contents.buffer_digests:
        return
    store.forget()
    for name, record in buffers_in(contents, channels):
        boundary, end, sample = name
        store.put(BufferKey(run_id, BlockIndex(boundary), End(end), SampleId(sample)), record)


def buffers_in(contents: ShardContents, channels: int) -> Iterator[tuple[BufferName, BufferRecord]]:
    """Those of a shard whose payloads are those of their digests."""
    for end in End:
        names = sorted(name for name in contents.buffer_digests if name[1] == end)
        for name, (tokens, payload) in zip(names, _rows(contents, end), strict=False):
            digest = contents.buffer_digests[name]
            if fingerprint_of(payload) == digest:
                yield name, BufferRecord(digest, tokens, channels, payload)


def _rows(contents: ShardContents, end: End) -> Iterator[tuple[int, bytes]]:
    """Tokens and payload of each buffer of an end, as far as there are whole ones."""
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
    """All payloads, uint8 [bytes], and sizes, int64 [buffers, 2], of each end that has some."""
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
    """See the module's docstring.

    Args:
        make_engine: an engine for this peer's device, not yet loaded.
        store: of this run's buffers, as an earlier start of this peer may have left it.
        files: how what else the run needs on this disk is written and read.

    Attributes:
        context: of this run at the peer.
        store: this stage's ends of the per-sample buffers.
        residuals: what error feedback left over of this stage's gradients.
        bases: what this stage's frames are coded along.
        committed_steps: how many steps are in it.
        last_attempt: whose commit was the last of them.
        summed_in: the attempt whose gradients the engine holds, complete; None if it holds none.
        progress: what the engine holds of the open step; None if that is to begin anew.
        holds_least: whether it ran out of memory before, and holds no more microbatches than plain
            1F1B does since.
        elsewhere: buffers of the open step's samples that pass other replicas, and so are out of
            date here once it is committed.
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
        self._one_change = asyncio.Lock()
        self.store = store if store is not None else BufferStore()
        self.files = files
        self._reset()

    def _reset(self) -> None:
        self.residuals = Residuals()
        self.bases = Bases()
        self.committed_steps, self.last_attempt = 0, NO_ATTEMPT
        self.summed_in: Attempt | None = None
        self.progress: StepProgress | None = None
        self.holds_least = False
        self.elsewhere: tuple[BufferKey, ...] = ()

    @property
    def run_id(self) -> RunId:
        """Whose stage it is."""
        return self._run_id

    @property
    def is_loaded(self) -> bool:
        """Whether there are weights."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """What trains the weights.

        Raises:
            OutOfTurn: nothing is loaded.
        """
        if self._engine is None:
            raise OutOfTurn(f"run {self._run_id}: nothing is loaded")
        return self._engine

    @property
    def name(self) -> ShardName:
        """What the state as it is now is called.

        Raises:
            OutOfTurn: nothing is loaded.
        """
        step = StepNumber(self.committed_steps)
        return ShardName(run_id=self._run_id, step=step, layers=self.engine.layers)

    def held(self, exported: ShardFile | None) -> HeldStage | None:
        """What to tell a coordinator that does not know; None if nothing is loaded."""
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
        """Make it the stage as the run began with it.

        Args:
            layers: of the stage.
            is_beginning: the run begins (again), and no buffer is to be left of an earlier try.
        """
        await self.at_rest()
        self.drop()
        if is_beginning:
            await asyncio.to_thread(self.store.forget)
        await self.prepare(layers)

    async def prepare(self, layers: LayerRange) -> None:
        """Load the engine, if there is none; buffers and residuals stay the objects they are."""
        async with self._one_change:
            if self._engine is None:
                await run_in(
                    self._context.codecs, compile_codecs, self._spec, self._context.codes_on
                )
                self._engine = await self._loaded(layers)
                logger.info("run %s: loaded layers %s", self._run_id, layers)

    async def _loaded(self, layers: LayerRange) -> Engine:
        """An engine with its weights.

        Raises:
            BadInput: this peer cannot host the stage; the message is fit for a client's eyes.
        """
        try:
            engine = await run_in(self._context.compute, self._make_engine, self._spec, layers)
            await run_in(self._context.compute, engine.load)
        except BadInput as error:
            raise refusal_of(error) from error
        return engine

    def drop(self) -> None:
        """Let go of everything but buffers: they tell themselves what they are good for."""
        self._engine = None
        self._reset()
        self.store.rollback()

    async def release(self) -> None:
        """Let go of everything, on disk too."""
        self.drop()
        await asyncio.to_thread(self.store.forget)
        await asyncio.to_thread(self.store.close)

    async def at_rest(self) -> None:
        """Wait for a change under way: one whose caller was cancelled goes on to its end."""
        async with self._one_change:
            pass

    async def commit(self, commit: CommitStep) -> None:
        """Apply the step's gradients, once. Cancelled, it still goes on to its end.

        Raises:
            OutOfTurn: the step is not the next one, or its gradients are not here.
        """
        await asyncio.shield(self._commit(commit))

    async def _commit(self, commit: CommitStep) -> None:
        async with self._one_change:
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
            if self.bases.has_news:
                await run_in(self._context.codecs, self.bases.commit)
            await self._commit_buffers(commit.step)
            # Not waited for: a step's last frame does, but for the first of a kind.
            self._context.codecs.submit(self.bases.learn)

    async def _applied(self, apply: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Change the weights. Where that fails half of them may have changed, so all are dropped.

        Raises:
            Exception: whatever `apply` raises.
        """
        try:
            await run_in(self._context.compute, apply, *args, **kwargs)
        except Exception:
            self.drop()
            raise

    async def _commit_buffers(self, step: StepNumber) -> None:
        """Make the step's buffers real; where that fails they are lost, which key frames repair."""
        try:
            # An epoch's first may take its time: it looks up the order of the next.
            await run_in(self._context.codecs, self.store.commit, step)
        except Exception:
            logger.exception("run %s: the buffers of step %d are lost", self._run_id, step)
            self.store.lose_staged()
        self.store.drop(self.elsewhere)

    async def apply_sum(self, commit: CommitStep, total: Tensor) -> None:
        """Apply a step that the other replicas computed, once. Cancelled, it still goes on.

        Args:
            commit: of the step.
            total: the sum of their shares, float32 [n].

        Raises:
            OutOfTurn: the step is not the next one.
        """
        await asyncio.shield(self._apply_sum(commit, total))

    async def _apply_sum(self, commit: CommitStep, total: Tensor) -> None:
        async with self._one_change:
            if commit.step < self.committed_steps:
                return
            if commit.step > self.committed_steps:
                raise OutOfTurn(f"sum of step {commit.step}, {self.committed_steps} are committed")
            numbers = commit.clip_factor, commit.learning_rate
            await self._applied(self.engine.apply_sum, commit.step, total, *numbers)
            self.committed_steps += 1
            self.last_attempt = commit.attempt

    def _check_turn(self, commit: CommitStep) -> None:
        if commit.step > self.committed_steps or self._engine is None:
            raise OutOfTurn(f"commit of step {commit.step}, {self.committed_steps} are committed")
        if commit.attempt != self.summed_in:
            raise OutOfTurn(
                f"commit of step {commit.step} by attempt {commit.attempt}, gradients here are of "
                f"{'none' if self.summed_in is None else self.summed_in}"
            )

    async def begin_step(self, step: StepNumber, num_targets: int) -> StepProgress:
        """Begin the next step, with no trace of an earlier try at it."""
        self.progress = self.summed_in = None
        begin = self._context.timeline.timed(SpanKind.GRADIENT, self.engine.begin_step)
        await run_in(self._context.compute, begin, step, num_targets)
        self.store.rollback()
        self.residuals.rollback()
        self.bases.rollback()
        self.progress = StepProgress(step)
        return self.progress

    def begin_evaluation(self, step: StepNumber) -> StepProgress:
        """Begin to evaluate the weights after the last step; no step is open meanwhile."""
        self.progress = StepProgress(step)
        return self.progress

    async def resume_step(self, progress: StepProgress) -> StepProgress:
        """Go on with the open step as far as an earlier attempt brought it here.

        Raises:
            OutOfTurn: the engine does not hold that.
        """
        self.progress = self.summed_in = None
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
        self.bases.rollback(but=progress.samples)
        # The engine holds it again, and what it counts from now on is not in this one.
        progress.gradient = None
        self.progress = progress
        return progress

    async def export(self, path: Path) -> None:
        """Write the trained weights down.

        Raises:
            OutOfTurn: nothing is loaded.
            Unavailable: the disk does not take it (now).
        """
        try:
            await run_in(self._context.compute, self._write_result, path)
        except (OSError, SafetensorError) as error:
            raise Unavailable(f"{path} cannot be written: {error}") from error

    def _write_result(self, path: Path) -> None:
        self.files.write_pieces(path, self.engine.export())

    # ---- as tensors

    async def weights(self) -> ShardContents:
        """Copies of weights and optimizer: what all replicas of the stage have alike.

        Raises:
            OutOfTurn: nothing is loaded.
        """
        return ShardContents(state=await run_in(self._context.compute, self.engine.state))

    async def everything(self) -> ShardContents:
        """Copies of all that the next steps follow from, at this peer.

        Raises:
            OutOfTurn: nothing is loaded.
        """
        await self.at_rest()  # weights are counted before their buffers are committed
        state = await run_in(self._context.compute, self.engine.state)
        kept = self.store, self.residuals, self.bases
        return await run_in(self._context.codecs, with_extras, state, *kept)

    async def restore(self, contents: ShardContents, step: int, attempt: Attempt) -> None:
        """Become what `weights` or `everything` gave at a peer with the same layers.

        Nothing but `load` or `prepare` went before. Cancelled, it still goes on to its end.

        Args:
            contents: of the other peer's state.
            step: how many steps are in it.
            attempt: whose commit was the last of them.

        Raises:
            BadSnapshot: it does not fit this stage.
            OutOfTurn: nothing is loaded that could take it.
        """
        await asyncio.shield(self._restore(contents, step, attempt))

    async def _restore(self, contents: ShardContents, step: int, attempt: Attempt) -> None:
        async with self._one_change:
            layers = self.engine.layers
            await run_in(self._context.compute, self.engine.load_state, contents.state)
            self.committed_steps, self.last_attempt = step, attempt
            channels = self._spec.model.hidden_size
            restore_residuals(self.residuals, contents)
            codecs = self._context.codecs
            await run_in(codecs, restore_bases, self.bases, channels, contents)
            await run_in(codecs, restore_buffers, self.store, self._run_id, channels, contents)
        logger.info("run %s: took up layers %s at step %d", self._run_id, layers, step)
