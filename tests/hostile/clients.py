"""A client with a good key and a bad job: it submits what it likes, and follows it to the end."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from google.protobuf.message import Message
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm_ft.client.swarm import SwarmClient
from swarm_ft.identity.roles import Role
from swarm_ft.ids import RunId
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.messages.client import RunPhase, RunStatus
from swarm_ft.protocol.spec.run_spec import ModelSpec, RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.stage import tensor_files
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.source import SINGLE_FILE
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.hostile.attacker import COORDINATOR, OK, Answer, Identity, exchange
from tests.hostile.job import VOCAB_SIZE, spec_message
from tests.hostile.processes import Processes
from tests.hostile.scene import Broken

ENDED_S = 60.0
"""A job that cannot succeed has to fail at its client within this time."""


class BadClient:
    """One client of the swarm, see the module's docstring.

    Args:
        swarm: that the client is a member of.
        who: the client's key and certificate.
    """

    def __init__(self, swarm: Processes, identity: Identity) -> None:
        self.swarm = swarm
        self.identity = identity
        own = Credentials(identity.key, identity.certificate, identity.authority)
        transport = GrpcTransport(GrpcOptions(credentials=own))
        self.calls = SwarmClient(swarm.honest_client.directory, transport)

    async def submit(self, spec: RunSpec, run_id: str, samples: bytes | None = None) -> Answer:
        """Submit a job under this name; nothing on the client's side checks the name."""
        header = pb.SubmitHeader(
            spec=spec_message(spec),
            spec_digest=spec.digest(),
            run_id=run_id,
            protocol_version=PROTOCOL_VERSION,
        )
        tokens = tokens_for(spec) if samples is None else samples
        return await self.send(header, tokens)

    async def send(self, header: pb.SubmitHeader, tokens: bytes) -> Answer:
        """Submit a job with this header, however wrong it is."""
        parts: list[Message] = [pb.SubmitPart(header=header)]
        size = max(1, PART_BYTES // row_bytes(header)) * row_bytes(header)
        for at in range(0, len(tokens), size):
            some = pb.SampleTokens(sample=at // row_bytes(header), token_ids=tokens[at : at + size])
            parts.append(pb.SubmitPart(tokens=some))
        return await exchange(self.swarm.at, COORDINATOR + "Submit", self.identity, *parts)

    async def ended(self, run_id: str, within_s: float = ENDED_S) -> RunStatus:
        """The last status of a run; one that goes on for too long is cancelled.

        Raises:
            Broken: it was not over in time.
        """
        last: RunStatus | None = None
        try:
            async with asyncio.timeout(within_s):
                events = self.calls.watch(RunId(run_id), lambda _trouble: None)
                async with aclosing(events):
                    async for event in events:
                        last = event if isinstance(event, RunStatus) else last
        except TimeoutError:
            await self.calls.cancel(RunId(run_id))
            state = f"{last.phase.name}, {words_of(last)!a}" if last else "never seen"
            raise Broken(
                f"run {run_id!a:.40} is not over after {within_s:.0f} s: {state}"
            ) from None
        if last is None:
            raise Broken(f"run {run_id!a:.40} has no status")
        return last

    async def failed(self, run_id: str, within_s: float = ENDED_S) -> str:
        """The reason for which a run failed, as its client reads it.

        Raises:
            Broken: the run did not fail in time.
        """
        status = await self.ended(run_id, within_s)
        if status.phase is not RunPhase.FAILED:
            raise Broken(f"run {run_id!a:.40} is {status.phase.name}, not FAILED")
        return words_of(status)

    async def reads(self, run_id: str, part: str, within_s: float = ENDED_S) -> str:
        """Return the first reason with this part that a run's client reads; then cancel the run.

        Raises:
            Broken: the client read no such reason in time.
        """
        known: list[str] = []
        try:
            async with asyncio.timeout(within_s):
                events = self.calls.watch(RunId(run_id), lambda _trouble: None)
                async with aclosing(events):
                    async for event in events:
                        known += [words_of(event)] if isinstance(event, RunStatus) else []
                        if known and part in known[-1]:
                            return known[-1]
        except TimeoutError:
            pass
        finally:
            await self.calls.cancel(RunId(run_id))
        raise Broken(f"run {run_id!a:.40}: no reason with {part!r} in {known[-3:]!a}")

    async def fetched(self, status: RunStatus) -> list[Path]:
        """The result of a finished run, as files; its peers delete it afterwards.

        Raises:
            Broken: it cannot be fetched.
        """
        folder = self.swarm.work_dir.parent / f"result-{len(list(self._results))}"
        folder.mkdir()
        try:
            async with asyncio.timeout(ENDED_S):
                paths = await self.calls.fetch_result(status, folder, lambda _trouble: None)
        except TimeoutError:
            paths = None
        if paths is None:
            raise Broken(f"run {status.run_id!a:.40}: its result cannot be fetched")
        await self.calls.acknowledge_result(RunId(status.run_id))
        return list(paths)

    @property
    def _results(self) -> list[Path]:
        return list(self.swarm.work_dir.parent.glob("result-*"))


PART_BYTES = 1 << 18


async def new_client(swarm: Processes) -> BadClient:
    """A client that joins now and owns nothing."""
    return BadClient(swarm, await swarm.member(Role.CLIENT))


def row_bytes(header: pb.SubmitHeader) -> int:
    """Bytes of one sample."""
    return max(4, 4 * header.spec.train.seq_length)


def words_of(status: RunStatus) -> str:
    """The status in the words that a client prints."""
    return status.detail


def tokens_for(spec: RunSpec) -> bytes:
    """Tokens for all rows of a job."""
    rng = np.random.default_rng(2)
    shape = (spec.train.num_rows, spec.train.seq_length)
    high = min(VOCAB_SIZE, spec.model.vocab_size)
    return rng.integers(0, high, shape).astype("<u4").tobytes()


def short_job(spec: RunSpec, num_steps: int = 2, **train: Any) -> RunSpec:
    """The honest job with few steps and these options."""
    return replace(spec, train=replace(spec.train, num_steps=num_steps, **train))


# ---- checkpoints


def altered_copy(swarm: Processes, folder: Path, changes: dict[str, float]) -> Path:
    """A copy of the honest model in which one value of each of these tensors is another.

    Args:
        swarm: whose honest model is copied.
        folder: where the copy goes; it must not exist.
        changes: new values by the name of their tensor.
    """
    honest = swarm.work_dir.parent / "model"
    folder.mkdir(parents=True)
    for file in honest.iterdir():
        if file.name != SINGLE_FILE:
            (folder / file.name).write_bytes(file.read_bytes())
    tensors: dict[str, Tensor] = load_file(honest / SINGLE_FILE)
    for name, value in changes.items():
        tensors[name].view(-1)[0] = value
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    return folder


def described(folder: Path | str) -> ModelSpec:
    """A model as a client describes it that has it, and that minds no NaN."""
    with patch.object(tensor_files, "_all_finite", new=lambda _: True):
        return open_checkpoint(str(folder)).describe()


HEX = re.compile(r"[0-9a-f]{8,}", re.IGNORECASE)


def check_discreet(words: str, *secrets: str) -> None:
    """Refuse a text that reveals a volunteer's files to a client.

    Args:
        words: without what the client itself wrote.
        secrets: texts that must not occur.

    Raises:
        Broken: they hold a digest, a path or one of the secrets.
    """
    leaked = [secret for secret in secrets if secret and secret in words]
    leaked += HEX.findall(words)
    leaked += [part for part in words.split() if part.strip("'\"(,").startswith(("/", "../"))]
    if leaked:
        raise Broken(f"the client reads {leaked} in {words!a}")


def is_taken(answer: Answer) -> bool:
    """Whether a submission became a run.

    Raises:
        Broken: nobody answered, or the coordinator met an error of its own.
    """
    if answer.code in ("internal", "silent", "UNKNOWN", "UNAVAILABLE"):
        raise Broken(f"the submission met {answer}")
    return answer.code == OK
