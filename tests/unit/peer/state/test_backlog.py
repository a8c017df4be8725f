"""Steps that wait to be applied: in order, in memory or in files, bit for bit."""

import pytest
import torch

from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.errors import Unavailable
from swarm_ft.peer.reduce.gradient_coder import EncodedSum
from swarm_ft.peer.state.learner import Backlog
from swarm_ft.protocol.messages.control import CommitStep
from swarm_ft.protocol.spec.codec_spec import parse_dp_spec

CODECS = {name: PieceCodec(parse_dp_spec(name)) for name in ("none", "q4")}


def commit_of(step):
    return CommitStep(run_id="run", attempt=3, step=step, clip_factor=0.5, learning_rate=step / 8)


def sum_of(step, codec, sizes=(512, 700)):
    generator = torch.Generator().manual_seed(step)
    pieces = (torch.randn(size, generator=generator) for size in sizes)
    return EncodedSum(tuple((len(x), codec.encode(x).tensor) for x in pieces))


async def fill(backlog, codec, count=5):
    for step in range(count):
        await backlog.append(commit_of(step), sum_of(step, codec))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("memory_bytes", [0, 6000, 1 << 20])
async def test_what_went_in_first_comes_out_first_with_the_same_bits(tmp_path, codec, memory_bytes):
    backlog = Backlog(tmp_path, "name", memory_bytes=memory_bytes)
    await fill(backlog, codec)
    for step in range(5):
        for _ in range(2):  # it stays until it is dropped
            commit, total = await backlog.first()
            assert commit == commit_of(step)
            assert torch.equal(total.decoded(codec), sum_of(step, codec).decoded(codec))
        backlog.drop_first()
    assert await backlog.first() is None
    assert list(tmp_path.iterdir()) == []


async def test_only_what_memory_does_not_take_lies_in_files(tmp_path):
    codec = CODECS["none"]
    held_bytes = sum_of(0, codec).num_bytes
    backlog = Backlog(tmp_path, "name", memory_bytes=2 * held_bytes)
    await fill(backlog, codec)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"name-{step}.sum" for step in (2, 3, 4)
    ]
    backlog.clear()
    assert list(tmp_path.iterdir()) == []
    assert await backlog.first() is None


async def test_a_disk_that_does_not_take_a_sum_is_told_of(tmp_path):
    backlog = Backlog(tmp_path / "nowhere", "name", memory_bytes=0)
    with pytest.raises(Unavailable, match=r"name-0\.sum cannot be written"):
        await backlog.append(commit_of(0), sum_of(0, CODECS["q4"]))
    assert await backlog.first() is None


async def test_a_file_that_is_gone_is_told_of(tmp_path):
    backlog = Backlog(tmp_path, "name", memory_bytes=0)
    await fill(backlog, CODECS["q4"], count=1)
    (tmp_path / "name-0.sum").unlink()
    with pytest.raises(Unavailable, match=r"name-0\.sum cannot be read"):
        await backlog.first()
