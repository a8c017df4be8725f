"""Steps that wait to be applied: in order, in memory or in files, bit for bit."""

from pathlib import Path

import pytest
import torch

from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.codec.spec import parse_dp_spec
from swarm_ft.errors import Unavailable
from swarm_ft.ids import Attempt, RunId, StepNumber
from swarm_ft.peer.reduce.gradient_coder import EncodedSum
from swarm_ft.peer.state.learner import Backlog
from swarm_ft.protocol.messages.control import CommitStep


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


CODECS = {name: PieceCodec(parse_dp_spec(name)) for name in ("none", "q4")}


def commit_of(step: int) -> CommitStep:
    return CommitStep(
        run_id=RunId("run"),
        attempt=Attempt(3),
        step=StepNumber(step),
        clip_factor=0.5,
        learning_rate=step / 8,
    )


def sum_of(step: int, codec: PieceCodec, sizes: tuple[int, ...] = (512, 700)) -> EncodedSum:
    generator = torch.Generator().manual_seed(step)
    pieces = (torch.randn(size, generator=generator) for size in sizes)
    return EncodedSum(tuple((len(x), codec.encode(x).tensor) for x in pieces))


async def fill(backlog: Backlog, codec: PieceCodec, count: int = 5) -> None:
    for step in range(count):
        await backlog.append(commit_of(step), sum_of(step, codec))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("memory_bytes", [0, 6000, 1 << 20])
async def test_what_went_in_first_comes_out_first_with_the_same_bits(
    tmp_path: Path, codec: PieceCodec, memory_bytes: int
) -> None:
    backlog = Backlog(tmp_path, "name", memory_bytes=memory_bytes)
    await fill(backlog, codec)
    for step in range(5):
        for _ in range(2):  # it stays until it is dropped
            first = await backlog.first()
            assert first is not None
            commit, total = first
            assert commit == commit_of(step)
            assert torch.equal(total.decoded(codec), sum_of(step, codec).decoded(codec))
        backlog.drop_first()
    assert await backlog.first() is None
    assert names_in(tmp_path) == []


async def test_only_what_memory_does_not_take_lies_in_files(tmp_path: Path) -> None:
    codec = CODECS["none"]
    held_bytes = sum_of(0, codec).num_bytes
    backlog = Backlog(tmp_path, "name", memory_bytes=2 * held_bytes)
    await fill(backlog, codec)
    assert names_in(tmp_path) == [f"name-{step}.sum" for step in (2, 3, 4)]
    backlog.clear()
    assert names_in(tmp_path) == []
    assert await backlog.first() is None


async def test_a_disk_that_does_not_take_a_sum_is_told_of(tmp_path: Path) -> None:
    backlog = Backlog(tmp_path / "nowhere", "name", memory_bytes=0)
    with pytest.raises(Unavailable, match=r"name-0\.sum cannot be written"):
        await backlog.append(commit_of(0), sum_of(0, CODECS["q4"]))
    assert await backlog.first() is None


async def test_a_file_that_is_gone_is_told_of(tmp_path: Path) -> None:
    backlog = Backlog(tmp_path, "name", memory_bytes=0)
    await fill(backlog, CODECS["q4"], count=1)
    (tmp_path / "name-0.sum").unlink()
    with pytest.raises(Unavailable, match=r"name-0\.sum cannot be read"):
        await backlog.first()
