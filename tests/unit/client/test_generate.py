"""A client generates text with peers that are busy, hostile or disconnect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from swarm_ft.client.generate import GenerationRequest, check_generates, generate
from swarm_ft.client.swarm import SwarmClient, result_name
from swarm_ft.errors import (
    BadModel,
    BadOption,
    Busy,
    MalformedMessage,
    NotAllowed,
    RunFailed,
    SwarmError,
    Unavailable,
)
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase, RunStatus, StageResult
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.messages.generation import (
    BeginText,
    FromStage,
    NextToken,
    TextActivation,
    TextTokens,
    ToStage,
    tokens_in_part,
)
from swarm_ft.protocol.messages.shard import ShardFile
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import TaskKind
from swarm_ft.protocol.spec.sampling import Sampling
from swarm_ft.transport.base import MessageStream, Server
from swarm_ft.transport.methods import GENERATE
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.memory_transport import MemoryTransport
from tests.specs import model_spec, run_spec

FIRST, LAST = LayerRange(0, 2), LayerRange(2, 4)
CHANNELS, VOCAB_SIZE = 8, 32

TextPart = BeginText | TextTokens | TextActivation
Stage = Callable[[list[TextPart]], FromStage | SwarmError | None]
"""What is answered to all that was said so far; None hangs up."""


def honest_first(parts: list[TextPart]) -> FromStage:
    """Return a token's id, eight times, as its activation."""
    part = parts[-1]
    assert isinstance(part, TextTokens)
    ids = np.frombuffer(part.token_ids, "<u4").astype("<f4")
    return TextActivation(values=ids.repeat(CHANNELS).tobytes())


def honest_last(parts: list[TextPart]) -> FromStage:
    """Return the sum of all tokens so far as the next token."""
    ids = [
        np.frombuffer(part.values, "<f4").reshape(-1, CHANNELS)[:, 0]
        for part in parts
        if isinstance(part, TextActivation)
    ]
    return NextToken(token=int(np.concatenate(ids).sum()) % VOCAB_SIZE)


def continued(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(sum(text) % VOCAB_SIZE)
    return text[len(prompt) :]


def failing_after(stage: Stage, num_parts: int, failure: FromStage | SwarmError | None) -> Stage:
    return lambda parts: stage(parts) if len(parts) - 1 <= num_parts else failure


@dataclass
class Swarm:
    """Peers, the messages that each received, and the coordinator's view of them."""

    transport: MemoryTransport = field(default_factory=MemoryTransport)
    directory: StaticDirectory = field(
        default_factory=lambda: StaticDirectory(Board(), ManualClock())
    )
    received: dict[str, list[list[TextPart]]] = field(default_factory=dict)
    stages: list[StageAssignment] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)

    async def add(self, peer: str, layers: LayerRange, stage: Stage) -> None:
        texts = self.received[peer] = list[list[TextPart]]()

        async def serve(stream: MessageStream[FromStage, ToStage]) -> None:
            parts: list[TextPart] = []
            texts.append(parts)
            while (part := await stream.receive()) is not None:
                parts.append(part)
                if isinstance(part, BeginText):
                    continue
                answer = stage(parts)
                if isinstance(answer, SwarmError):
                    raise answer
                if answer is None:
                    return
                await stream.send(answer)

        server = await self.transport.serve(peer, 1, {GENERATE: serve})
        self.servers.append(server)
        await self.directory.announce(Role.PEER, peer, server.endpoint)
        self.stages.append(StageAssignment(peer_id=PeerId(peer), layers=layers, endpoint=""))

    @property
    def status(self) -> RunStatus:
        file = ShardFile(digest=bytes(16), total_bytes=5)
        return RunStatus(
            run_id=RunId("run"),
            phase=RunPhase.FINISHED,
            detail="",
            spec=replace(run_spec(), model=model_spec(hidden_size=CHANNELS, vocab_size=VOCAB_SIZE)),
            assignments=tuple(sorted(self.stages, key=lambda stage: stage.layers.start)),
            committed_steps=StepNumber(7),
            results=tuple(StageResult(peer_id=one.peer_id, file=file) for one in self.stages),
        )

    async def generate(
        self, wanted: GenerationRequest, troubles: list[str] | None = None
    ) -> list[int]:
        client, tokens = SwarmClient(self.directory, self.transport), list[int]()
        on_trouble = troubles.append if troubles is not None else pytest.fail
        found = await generate(client, self.status, wanted, tokens.append, on_trouble)
        assert found == tokens
        return found


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm()
    yield made
    for server in made.servers:
        await server.stop()


WANTED = GenerationRequest(prompt=(3, 4), max_new_tokens=6)


async def test_all_stages_are_told_all_tokens_once_and_the_last_one_chooses(swarm: Swarm) -> None:
    await swarm.add("a", FIRST, honest_first)
    await swarm.add("b", LAST, honest_last)
    wanted = replace(WANTED, sampling=Sampling(seed=3))
    assert await swarm.generate(wanted) == continued(WANTED.prompt, 6)
    for peer, layers in (("a", FIRST), ("b", LAST)):
        (parts,) = swarm.received[peer]
        assert parts[0] == BeginText(
            name=result_name(swarm.status, layers), max_tokens=7, sampling=Sampling(seed=3)
        )
        assert len(parts) == 1 + 6, "the prompt, then a token at a time"


async def test_a_text_ends_behind_its_end(swarm: Swarm) -> None:
    await swarm.add("a", FIRST, honest_first)
    await swarm.add("b", LAST, honest_last)
    whole = continued(WANTED.prompt, 6)
    assert await swarm.generate(replace(WANTED, stop_tokens=frozenset({whole[2], 31}))) == whole[:3]


async def test_a_long_prompt_goes_in_parts(swarm: Swarm) -> None:
    await swarm.add("a", FIRST, honest_first)
    await swarm.add("b", LAST, honest_last)
    fits = tokens_in_part(CHANNELS)
    prompt = (1,) * (fits + 5)
    assert await swarm.generate(GenerationRequest(prompt=prompt, max_new_tokens=1)) == continued(
        prompt, 1
    )
    (parts,) = swarm.received["a"]
    sizes = [len(part.token_ids) // 4 for part in parts if isinstance(part, TextTokens)]
    assert sizes == [fits, 5]


FAILURES: list[tuple[FromStage | SwarmError | None, str]] = [
    (Busy("16 texts are continued here"), "16 texts"),
    (Unavailable("going away"), "going away"),
    (None, "it closed the stream"),
    (NextToken(token=VOCAB_SIZE), f"expected a token below {VOCAB_SIZE}"),
    (TextActivation(values=bytes(4)), f"expected a token below {VOCAB_SIZE}"),
]


@pytest.mark.parametrize(("failure", "words"), FAILURES)
@pytest.mark.parametrize("num_parts", [0, 3])
async def test_another_replica_goes_on_with_the_text(
    swarm: Swarm, failure: FromStage | SwarmError | None, words: str, num_parts: int
) -> None:
    await swarm.add("a", FIRST, honest_first)
    await swarm.add("b", LAST, failing_after(honest_last, num_parts, failure))
    await swarm.add("c", LAST, honest_last)
    troubles: list[str] = []
    assert await swarm.generate(WANTED, troubles) == continued(WANTED.prompt, 6)
    (trouble,) = troubles
    assert trouble.startswith("layers 2-4: peer b: ")
    assert words in trouble
    assert len(swarm.received["a"]) == 2, "it is told the text anew"


async def test_activations_of_another_size_go_to_nobody(swarm: Swarm) -> None:
    await swarm.add("a", FIRST, lambda _parts: TextActivation(values=bytes(4)))
    await swarm.add("b", LAST, honest_last)
    with pytest.raises(MalformedMessage, match="layers 0-2: peer a: expected activations of 2 tok"):
        await swarm.generate(WANTED)
    assert all(len(parts) <= 1 for parts in swarm.received["b"])


async def test_without_another_replica_the_reason_is_told(swarm: Swarm) -> None:
    await swarm.add("a", FIRST, honest_first)
    await swarm.add("b", LAST, lambda _parts: Busy("no room"))
    await swarm.add("c", LAST, lambda _parts: Busy("no room either"))
    troubles: list[str] = []
    with pytest.raises(Busy, match="peer c: no room either; no other peer holds these layers"):
        await swarm.generate(WANTED, troubles)
    assert len(troubles) == 1


@pytest.mark.parametrize("error", [BadModel("keeps nothing"), NotAllowed("it is not for you")])
async def test_what_all_would_say_is_asked_of_one(swarm: Swarm, error: SwarmError) -> None:
    await swarm.add("a", FIRST, honest_first)
    await swarm.add("b", LAST, lambda _parts: error)
    await swarm.add("c", LAST, honest_last)
    with pytest.raises(type(error), match=error.message):
        await swarm.generate(WANTED)
    assert not swarm.received["c"]


@pytest.mark.parametrize(
    ("phase", "error", "words"),
    [
        (RunPhase.TRAINING, Unavailable, "is training, at step 7 of 3"),
        (RunPhase.COLLECTED, RunFailed, "its result was fetched and deleted"),
        (RunPhase.CANCELLED, RunFailed, "run run cancelled"),
        (RunPhase.FAILED, RunFailed, "run run failed"),
    ],
)
def test_only_a_finished_run_speaks(phase: RunPhase, error: type[SwarmError], words: str) -> None:
    status = Swarm().status
    check_generates(status)
    with pytest.raises(error, match=words):
        check_generates(replace(status, phase=phase))


def test_classifiers_do_not_speak() -> None:
    status = Swarm().status
    kind = TaskKind.CLASSIFICATION
    train = replace(status.spec.train, task_kind=kind, label_names="no,yes")
    with pytest.raises(BadOption, match="this run trains classification"):
        check_generates(replace(status, spec=replace(status.spec, train=train)))
