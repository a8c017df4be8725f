"""Buffers of every size and end go into a snapshot and come back, or are left out."""

from dataclasses import replace

import pytest
import torch

from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.codec import pack_buffer
from swarm_ft.digest import fingerprint_of
from swarm_ft.errors import BadSnapshot
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.peer.boundary.side_info import SideInfoKey, SideInfoStore, TensorKind
from swarm_ft.peer.reduce.gradient_coder import Residuals
from swarm_ft.peer.state import stage_state
from swarm_ft.peer.state.stage_state import restore_buffers, restore_side_info, with_extras
from swarm_ft.snapshots.shard import ShardContents
from tests.codecs import parse

RUN, CHANNELS = RunId("run"), 8


def key(boundary: int, end: End, sample: int) -> BufferKey:
    return BufferKey(RUN, BlockIndex(boundary), end, SampleId(sample))


def record(bits: int, seed: int) -> BufferRecord:
    """Make a record of a sample whose length follows from its number."""
    shape = 4 + seed % 3, CHANNELS
    payload = pack_buffer(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), bits)
    return BufferRecord(fingerprint_of(payload), *shape, payload)


def filled(bits: int) -> BufferStore:
    """Buffers of two boundaries, and what is owed at one of them."""
    store = BufferStore()
    for sample in (5, 0, 3):
        for boundary, end in ((4, End.RECEIVED), (8, End.SENT)):
            store.stage(key(boundary, end, sample), record(bits, sample + boundary))
        store.stage(key(4, End.RESIDUAL, sample), record(16, sample))
    store.commit()
    return store


def restored(contents: ShardContents) -> dict[BufferKey, BufferRecord]:
    store = BufferStore()
    restore_buffers(store, RUN, CHANNELS, contents)
    return dict(store.records())


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_buffers_of_the_runs_bits_and_residuals_of_16_come_back(bits: int) -> None:
    store = filled(bits)
    assert len(store) == 9
    assert restored(with_extras({}, store, Residuals(), SideInfoStore())) == dict(store.records())


def learned_bases() -> SideInfoStore:
    bases, key = SideInfoStore(), SideInfoKey(BlockIndex(8), TensorKind.FIRST)
    for sample in range(3):
        x = torch.randn(20, CHANNELS, generator=torch.Generator().manual_seed(sample))
        bases.record_frame(key, SampleId(sample), parse("qk0.1"), x, None)
    bases.commit()
    return bases


def test_bases_come_back() -> None:
    bases, again = learned_bases(), SideInfoStore()
    contents = with_extras({}, BufferStore(), Residuals(), bases)
    assert contents.extras
    restore_side_info(again, CHANNELS, contents)
    expected, found = bases.export(), again.export()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    restore_side_info(again, CHANNELS, with_extras({}, BufferStore(), Residuals(), SideInfoStore()))
    assert not again.export(), "what a snapshot holds takes the place of what is here"


@pytest.mark.parametrize(
    "extras",
    [
        {"bases/8/9": torch.zeros(9, dtype=torch.uint8)},
        {"bases/8/1": torch.zeros(9, dtype=torch.uint8)},
        {"bases/8/1": torch.zeros(9)},
        {"bases/": torch.zeros(0)},
        {"bases/8/1/steps": torch.tensor(-1)},
    ],
)
def test_what_is_no_basis_is_no_snapshot(extras: dict[str, torch.Tensor]) -> None:
    with pytest.raises(BadSnapshot, match="start a new run"):
        restore_side_info(SideInfoStore(), CHANNELS, ShardContents(state={}, extras=extras))


def test_a_store_without_buffers_has_nothing_to_write() -> None:
    contents = with_extras({}, BufferStore(), Residuals(), SideInfoStore())
    assert not contents.extras
    assert restored(contents) == {}


def test_what_a_snapshot_holds_takes_the_place_of_what_is_here() -> None:
    store = filled(16)
    before = dict(store.records())
    contents = with_extras({}, store, Residuals(), SideInfoStore())
    newer = key(8, End.SENT, 7)
    store.stage(newer, record(16, 99))
    store.stage(key(8, End.SENT, 3), record(16, 98))
    store.commit()
    restore_buffers(store, RUN, CHANNELS, contents)
    assert dict(store.records()) == before


def test_too_many_buffers_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(16)
    before = dict(store.records())
    monkeypatch.setattr(
        stage_state, "MAX_BUFFER_BYTES", sum(len(r.payload) for r in before.values()) - 1
    )
    contents = with_extras({}, store, Residuals(), SideInfoStore())
    assert not contents.extras
    assert not contents.buffer_digests
    restore_buffers(store, RUN, CHANNELS, contents)
    assert dict(store.records()) == before


def test_buffers_that_are_not_what_their_digest_says_are_left_out() -> None:
    store = filled(4)
    contents = with_extras({}, store, Residuals(), SideInfoStore())
    torn, sizes = contents.extras["buffers/sent"], contents.extras["buffers/sent/sizes"]
    torn[sizes[0, 1] + sizes[1, 1] - 1] ^= 1
    expected = dict(store.records())
    del expected[key(8, End.SENT, 3)]
    assert restored(contents) == expected
    fewer = {name: x for name, x in contents.extras.items() if name != "buffers/owed"}
    again = restored(replace(contents, extras=fewer))
    assert {name.end for name in again} == {End.SENT, End.RECEIVED}


@pytest.mark.parametrize(
    "sizes",
    [
        torch.tensor([[6, -1]]),
        torch.tensor([[6, 1 << 40]]),
        torch.tensor([6]),
        torch.tensor([[6.0, 4.0]]),
    ],
)
def test_sizes_that_cannot_be_are_not_followed(sizes: torch.Tensor) -> None:
    contents = with_extras({}, filled(4), Residuals(), SideInfoStore())
    wrong = restored(replace(contents, extras={**contents.extras, "buffers/sent/sizes": sizes}))
    assert {name.end for name in wrong} == {End.RECEIVED, End.RESIDUAL}
