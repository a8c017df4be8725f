"""A client's job: it arrives as a header and every sample's tokens, is checked, and becomes a run.

The client draws the run's name, so that a job that it submits again, because it heard no answer,
is the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.errors import BadDataset, MalformedMessage, OutOfTurn, RunMismatch
from swarm_ft.ids import RunId
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.spec.checks import checked_run_id
from swarm_ft.protocol.spec.digest import check_spec_digest
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.wire.coordinator_wire import BYTES_PER_TOKEN, tokens_from_wire
from swarm_ft.protocol.wire.run_wire import spec_from_wire
from swarm_ft.transport.base import MessageStream

MAX_DATA_BYTES = 4 << 30
"""Token ids of one run; more would let one client fill the coordinator's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job, checked.

    Attributes:
        samples: tokens of sample 0, 1, ... as little-endian uint32.
    """

    run_id: RunId
    spec: RunSpec
    samples: list[bytes]


class Submissions:
    """Makes every submission a run, once.

    Args:
        journal: where runs and their data are kept.
        known: the run of that name, if there is one.
        begin: told of a run that is new, and in the journal.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        known: Callable[[RunId], Run | None],
        begin: Callable[[Run], None],
    ) -> None:
        self._journal = journal
        self._known = known
        self._begin = begin
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, submission: Submission) -> None:
        """Make it a run, unless it is one already. Cancelled, it still goes on to its end.

        Raises:
            RunMismatch: a run of that name has another spec, or other data.
            JournalError: the journal cannot be written.
        """
        task = asyncio.create_task(self._accept(submission))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the client that would be told may be gone

    async def _accept(self, submission: Submission) -> None:
        async with self._one_at_a_time:
            known = self._known(submission.run_id)
            if known is None:
                run = Run(run_id=submission.run_id, spec=submission.spec)
                await asyncio.to_thread(self._journal.write_run, run, submission.samples)
                self._begin(run)
            elif not await self._is_same(known, submission):
                raise RunMismatch(
                    f"run {known.run_id}: is here already, with other options or other data; "
                    "submit the job under another name"
                )

    async def _is_same(self, run: Run, submission: Submission) -> bool:
        if run.spec.digest() != submission.spec.digest():
            return False
        holds = self._journal.holds_samples
        return await asyncio.to_thread(holds, run.run_id, submission.samples)


async def receive_submission(
    stream: MessageStream[pb.RunStatus, pb.SubmitPart],
) -> Submission:
    """A job as it comes in.

    Raises:
        RunMismatch: the client's digest of the RunSpec is not ours.
        BadDataset: samples are missing, too many, or hold ids outside the vocabulary.
        MalformedMessage: a field is out of its bounds.
    """
    first = await stream.receive()
    if first is None or first.WhichOneof("body") != "header":
        raise OutOfTurn(f"{stream.remote}: expected a header as the first message")
    run_id = checked_run_id(first.header.run_id)
    spec = spec_from_wire(first.header.spec)
    here, there = spec.digest(), first.header.spec_digest
    check_spec_digest(f"run {run_id}", here, there, "the client")
    total_bytes = spec.train.num_samples * spec.train.seq_length * BYTES_PER_TOKEN
    if total_bytes > MAX_DATA_BYTES:
        raise BadDataset(f"data: {total_bytes} bytes of tokens, {MAX_DATA_BYTES} allowed")
    samples: list[bytes] = []
    while (part := await stream.receive()) is not None:
        samples.append(_sample(part, spec, len(samples)))
    if len(samples) != spec.train.num_samples:
        raise BadDataset(f"data: expected {spec.train.num_samples} samples, got {len(samples)}")
    return Submission(run_id=run_id, spec=spec, samples=samples)


def _sample(part: pb.SubmitPart, spec: RunSpec, expected: int) -> bytes:
    if part.WhichOneof("body") != "tokens" or expected >= spec.train.num_samples:
        raise MalformedMessage(f"data: expected {spec.train.num_samples} samples of tokens")
    sample, token_ids = tokens_from_wire(part.tokens)
    if sample != expected:
        raise MalformedMessage(f"data: expected sample {expected}, got sample {sample}")
    if len(token_ids) != spec.train.seq_length * BYTES_PER_TOKEN:
        num_tokens = len(token_ids) // BYTES_PER_TOKEN
        raise BadDataset(
            f"sample {sample}: expected {spec.train.seq_length} tokens, got {num_tokens}"
        )
    largest = int(np.frombuffer(token_ids, dtype="<u4").max())
    if largest >= spec.model.vocab_size:
        raise BadDataset(
            f"sample {sample}: token id {largest} is outside the model's vocabulary of "
            f"{spec.model.vocab_size}; does the tokenizer belong to the model?"
        )
    return token_ids
