"""Trained stages continue texts where they are, as transformers does with the fetched result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_ft.client.export import assemble
from swarm_ft.client.generate import GenerationRequest, check_generates, generate
from swarm_ft.client.swarm import SwarmClient, result_name
from swarm_ft.errors import (
    Busy,
    MalformedMessage,
    NotAllowed,
    NotFound,
    OutOfTurn,
    RunFailed,
    SwarmError,
    Unavailable,
)
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId
from swarm_ft.peer.generation import MAX_TEXTS
from swarm_ft.protocol.messages.client import RunPhase, RunStatus
from swarm_ft.protocol.messages.generation import (
    BeginText,
    FromStage,
    NextToken,
    TextActivation,
    TextTokens,
    ToStage,
)
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Adapter
from swarm_ft.protocol.spec.sampling import Sampling
from swarm_ft.stage.adapters import WEIGHTS_FILE, save_adapter_config
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.transport.base import MessageStream
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import GENERATE
from tests.integration.conftest import SEQ_LENGTH, VOCAB_SIZE, Job, MakeJob
from tests.local_swarm import LocalSwarm
from tests.members import make_swarm
from tests.whole_model import whole_model

PROMPT, NEW_TOKENS = (5, 17, 17, 40), 20
LAYERS = ["0-2", "2-5", "5-6"]
WANTED = GenerationRequest(prompt=PROMPT, max_new_tokens=NEW_TOKENS)
LORA: dict[str, Any] = {"adapter": Adapter.LORA, "lora_r": 4, "lora_alpha": 64}


def silent(_trouble: object) -> None:
    pass


async def finished(swarm: LocalSwarm, job: Job) -> RunStatus:
    status = (await swarm.train(job.spec, job.samples))[-1]
    assert isinstance(status, RunStatus)
    check_generates(status)
    return status


async def result_of(swarm: LocalSwarm, status: RunStatus, folder: Path) -> Path:
    """Export the result as a client would; the peers keep theirs."""
    spec, (shards, out) = status.spec, (folder / "shards", folder / "out")
    await asyncio.to_thread(shards.mkdir)
    fetched = await swarm.client.fetch_shards(status, shards)
    model = open_checkpoint(spec.model.reference, spec.train)

    def write_config(to: Path) -> None:
        if spec.train.adapts:
            save_adapter_config(to, model, spec)
        else:
            model.save_config(to, tie_word_embeddings=spec.keeps_tied)

    as_one = WEIGHTS_FILE if spec.train.adapts else None
    await asyncio.to_thread(assemble, out, fetched, write_config, as_one=as_one)
    return out


def of_transformers(model_dir: Path, prompt: Sequence[int] = PROMPT) -> list[int]:
    text = whole_model(model_dir).generate(
        input_ids=torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = text[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize(
    ("model", "layers", "changes"),
    [("gpt2", LAYERS, {}), ("llama", LAYERS, {}), ("llama", ["0-6"], {}), ("gpt2", LAYERS, LORA)],
)
async def test_a_trained_swarm_generates_what_its_result_does(
    make_job: MakeJob, tmp_path: Path, model: str, layers: list[str], changes: dict[str, Any]
) -> None:
    job = make_job(model, **changes)
    async with LocalSwarm(tmp_path, layers) as swarm:
        status, tokens = await finished(swarm, job), list[int]()
        found = await generate(swarm.client, status, WANTED, tokens.append, pytest.fail)
        out = await result_of(swarm, status, tmp_path)
    assert found == tokens == await asyncio.to_thread(of_transformers, out)
    if model == "llama":  # a tied model repeats one word
        assert len(set(found)) > 1


@pytest.mark.thorough
async def test_a_text_is_longer_than_samples_and_ends_where_it_is_told_to(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("llama", num_steps=4)
    long = WANTED.prompt * 8
    assert len(long) > SEQ_LENGTH
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        status = await finished(swarm, job)
        wanted = replace(WANTED, prompt=long)
        found = await generate(swarm.client, status, wanted, silent, pytest.fail)
        end = found[len(found) // 2]
        wanted = replace(wanted, stop_tokens=frozenset({end}))
        ended = await generate(swarm.client, status, wanted, silent, pytest.fail)
        out = await result_of(swarm, status, tmp_path)
    assert found == await asyncio.to_thread(of_transformers, out, long)
    assert ended == found[: found.index(end) + 1]


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=2.0, top_p=0.95, seed=7)])
@pytest.mark.thorough
async def test_a_text_goes_on_at_another_replica_when_a_peer_dies(
    make_job: MakeJob, tmp_path: Path, sampling: Sampling | None
) -> None:
    job, wanted = make_job("llama"), replace(WANTED, sampling=sampling)
    async with LocalSwarm(tmp_path, ["0-2", "2-5", "2-5", "5-6"]) as swarm:
        status = await finished(swarm, job)
        quiet = await generate(swarm.client, status, wanted, silent, pytest.fail)
        tokens, troubles = list[int](), list[str]()
        first = next(r.peer_id for r in status.results if r.peer_id in ("peer-1", "peer-2"))

        async with dying_after(swarm, first, tokens) as on_token:
            found = await generate(swarm.client, status, wanted, on_token, troubles.append)
        other = "peer-2" if first == "peer-1" else "peer-1"
        assert found == tokens == quiet
        (trouble,) = troubles
        assert trouble.startswith(f"layers 2-5: peer {first}: ")

        await swarm.kill_peer(PeerId(other))
        with pytest.raises(Unavailable, match=r"layers 2-5: peer .* no other peer holds these"):
            await generate(swarm.client, status, wanted, silent, troubles.append)
        assert len(troubles) <= 2, "that the other died is told once, and by the error"


@asynccontextmanager
async def dying_after(
    swarm: LocalSwarm, peer: PeerId, tokens: list[int]
) -> AsyncIterator[Callable[[int], None]]:
    """Yield a callback for tokens that kills the peer in the middle of the text."""
    dying: list[asyncio.Task[None]] = []

    def on_token(token: int) -> None:
        tokens.append(token)
        if len(tokens) == NEW_TOKENS // 2:
            dying.append(asyncio.create_task(swarm.kill_peer(peer)))

    yield on_token
    await asyncio.gather(*dying)
    assert dying


@pytest.mark.thorough
async def test_seeds_say_what_is_drawn(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("llama", num_steps=2)
    async with LocalSwarm(tmp_path, ["0-6"]) as swarm:
        status = await finished(swarm, job)
        drawn = [
            await generate(
                swarm.client,
                status,
                replace(WANTED, sampling=Sampling(temperature=2.0, top_k=0, seed=seed)),
                silent,
                pytest.fail,
            )
            for seed in (1, 1, 2)
        ]
    assert drawn[0] == drawn[1] != drawn[2]


# ---- when, and for whom


async def test_nobody_speaks_before_a_run_is_finished_and_after_it_is_fetched(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(num_steps=2)
    async with LocalSwarm(tmp_path, ["0-3", "3-6"]) as swarm:
        status = await finished(swarm, job)
        early = replace(status, phase=RunPhase.TRAINING, committed_steps=1)
        with pytest.raises(Unavailable, match="is training, at step 1 of 2; generate works once"):
            check_generates(early)
        async with text_at(swarm.client, status, PeerId("peer-0"), LayerRange(0, 3)) as stream:
            await reply_to(stream, TextTokens(token_ids=bytes(4)))
            await swarm.client.acknowledge_result(status.run_id)
            with pytest.raises(NotFound, match="released the trained stage"):
                await stream.receive()
        with pytest.raises(NotFound, match="does not offer it"):
            await generate(swarm.client, status, WANTED, silent, silent)
        with pytest.raises(RunFailed, match="was fetched and deleted from the swarm"):
            check_generates(await swarm.client.run(status.run_id))


async def test_a_run_speaks_to_its_owner_alone(make_job: MakeJob, tmp_path: Path) -> None:
    job, members = make_job(num_steps=2), make_swarm()
    async with LocalSwarm(tmp_path, ["0-6"], members=members) as swarm:
        status = await finished(swarm, job)
        assert len(await generate(swarm.client, status, WANTED, silent, pytest.fail)) == NEW_TOKENS
        for role, words in ((Role.CLIENT, "it is not for"), (Role.PEER, "a call by a client")):
            transport = GrpcTransport(GrpcOptions(credentials=members.member(role)))
            other = SwarmClient(swarm.directory, transport)
            with pytest.raises(NotAllowed, match=words):
                await generate(other, status, WANTED, silent, silent)


# ---- messages to peers that are no text


@asynccontextmanager
async def text_at(
    client: SwarmClient,
    status: RunStatus,
    peer: PeerId,
    layers: LayerRange,
    *,
    max_tokens: int = 20,
    name: ShardName | None = None,
) -> AsyncIterator[MessageStream[ToStage, FromStage]]:
    channel = await client.peer_channel(peer)
    stream = channel.open(GENERATE)
    begin = BeginText(name=name or result_name(status, layers), max_tokens=max_tokens)
    try:
        await stream.send(begin)
        yield stream
    finally:
        await stream.cancel()
        await channel.close()


async def reply_to(stream: MessageStream[ToStage, FromStage], part: ToStage) -> FromStage | None:
    await stream.send(part)
    return await stream.receive()


@pytest.mark.thorough
async def test_what_is_no_part_of_a_text_ends_it_and_nothing_else(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("llama", num_steps=2)
    hidden = TextActivation(values=bytes(4 * job.spec.model.hidden_size))
    token = TextTokens(token_ids=bytes(4))
    of_first: list[tuple[ToStage, type[SwarmError], str]] = [
        (hidden, OutOfTurn, "expected tokens of the text, got TextActivation"),
        (TextTokens(token_ids=b"\xff" * 4), MalformedMessage, f"expected 0 to {VOCAB_SIZE - 1}"),
        (TextTokens(token_ids=bytes(4 * 10)), MalformedMessage, "T from 1 to 9"),
    ]
    of_last: list[tuple[ToStage, type[SwarmError], str]] = [
        (token, OutOfTurn, "expected activations of the text, got TextTokens"),
        (TextActivation(values=bytes(4)), MalformedMessage, "float32 of 32 channels"),
        (TextActivation(values=bytes(4 * 32 * 257)), MalformedMessage, "at most 256 tokens"),
        (TextActivation(values=b"\0\0\xc0\x7f" * 32), SwarmError, "inf or NaN"),
    ]
    async with LocalSwarm(tmp_path, ["0-3", "3-6"]) as swarm:
        status = await finished(swarm, job)
        stages = (("peer-0", LayerRange(0, 3), of_first), ("peer-1", LayerRange(3, 6), of_last))
        for peer, layers, wrong in stages:
            for part, error, words in wrong:
                opened = text_at(swarm.client, status, PeerId(peer), layers, max_tokens=9)
                async with opened as stream:
                    with pytest.raises(error, match=words):
                        await reply_to(stream, part)
        first, layers = PeerId("peer-0"), LayerRange(0, 3)
        async with text_at(swarm.client, status, first, layers, max_tokens=1) as stream:
            assert isinstance(await reply_to(stream, token), TextActivation)
            with pytest.raises(MalformedMessage, match="expected 1 tokens of a text"):
                await reply_to(stream, token)
        other = replace(result_name(status, layers), is_result=False)
        async with text_at(swarm.client, status, first, layers, name=other) as stream:
            with pytest.raises(NotFound):
                await reply_to(stream, token)
        found = await generate(swarm.client, status, WANTED, silent, pytest.fail)
        assert len(found) == NEW_TOKENS


async def test_texts_are_bounded_in_number_and_in_size(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("llama", num_steps=2)
    token, peer, layers = TextTokens(token_ids=bytes(4)), PeerId("peer-0"), LayerRange(0, 6)
    async with LocalSwarm(tmp_path, ["0-6"], memory_bytes=8 << 20) as swarm:
        status = await finished(swarm, job)
        async with text_at(swarm.client, status, peer, layers, max_tokens=30_000) as stream:
            with pytest.raises(Busy, match=r"a text of 30000 tokens takes .* bytes here, and"):
                await reply_to(stream, token)
        channel = await swarm.client.peer_channel(peer)
        begin, open_ones = BeginText(name=result_name(status, layers), max_tokens=20), []
        for _ in range(MAX_TEXTS):
            open_ones.append(channel.open(GENERATE))
            await open_ones[-1].send(begin)
            assert isinstance(await reply_to(open_ones[-1], token), NextToken)
        async with text_at(swarm.client, status, peer, layers, max_tokens=20) as stream:
            with pytest.raises(Busy, match=f"{MAX_TEXTS} texts"):
                await reply_to(stream, token)
        await open_ones[0].finish()
        assert await open_ones[0].receive() is None, "it has ended, and there is room"
        async with text_at(swarm.client, status, peer, layers, max_tokens=20) as stream:
            assert isinstance(await reply_to(stream, token), NextToken)
        await channel.close()
