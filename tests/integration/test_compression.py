"""AQ-SGD on the wire: key frames once, deltas ever after, equal buffers at both ends, few bytes."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from swarm_ft.buffers import BufferKey, End
from swarm_ft.codec import buffer_bytes
from swarm_ft.ids import BlockIndex, PeerId, SampleId
from swarm_ft.protocol.messages.client import RunEvent, StepCommitted
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

NUM_SAMPLES, EPOCHS = 12, 3


def steps_of(events: Iterable[RunEvent]) -> list[StepCommitted]:
    return [event for event in events if isinstance(event, StepCommitted)]


def total(events: Iterable[RunEvent], field: str, boundary: int, *, from_step: int = 0) -> int:
    return sum(
        getattr(traffic, field)
        for step in steps_of(events)
        for traffic in step.traffic
        if traffic.boundary == boundary and step.step >= from_step
    )


@pytest.fixture(params=[16, 4], ids="{} bits".format)
def aq_job(make_job: MakeJob, request: pytest.FixtureRequest) -> Job:
    return make_job(
        num_samples=NUM_SAMPLES,
        num_steps=EPOCHS * 3,
        forward_codec="aq4",
        backward_codec="q8",
        shuffle=True,
        buffer_bits=request.param,
    )


async def test_a_sample_sends_one_key_frame_and_then_deltas(aq_job: Job, tmp_path: Path) -> None:
    async with LocalSwarm(tmp_path, ["0-2", "2-4", "4-6"]) as swarm:
        events = await swarm.train(aq_job.spec, aq_job.samples)
    for boundary in (2, 4):
        assert total(events, "key_frames", boundary) == NUM_SAMPLES
        assert total(events, "delta_frames", boundary) == NUM_SAMPLES * (EPOCHS - 1)
        assert total(events, "key_frames", boundary, from_step=3) == 0


async def test_both_ends_hold_equal_buffers_of_every_sample(
    aq_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or the last epoch would let go of each after its last visit.
    monkeypatch.setattr("swarm_ft.peer.buffer_storage.VisitOrder", lambda _train: None)
    async with LocalSwarm(tmp_path, ["0-2", "2-4", "4-6"]) as swarm:
        status = await swarm.client.submit(aq_job.spec, aq_job.samples)
        await swarm.watch(status.run_id)
        nodes = [swarm.peers[PeerId(f"peer-{i}")].node for i in range(3)]
        stores = [node.buffers[status.run_id] for node in nodes]
        for index, boundary in enumerate((2, 4)):
            for sample in range(NUM_SAMPLES):
                name = (status.run_id, BlockIndex(boundary))
                sent = stores[index].get(BufferKey(*name, End.SENT, SampleId(sample)))
                received = stores[index + 1].get(BufferKey(*name, End.RECEIVED, SampleId(sample)))
                assert sent is not None
                assert sent == received
                size = buffer_bytes(sent.tokens, sent.channels, aq_job.spec.train.buffer_bits)
                assert len(sent.payload) == size


async def test_compressed_training_stays_close_to_uncompressed(
    make_job: MakeJob, aq_job: Job, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    plain = make_job(num_samples=NUM_SAMPLES, num_steps=EPOCHS * 3, shuffle=True)
    exact = [step.loss for step in steps_of(await quiet_events(plain, ["0-3", "3-6"]))]
    async with LocalSwarm(tmp_path, ["0-3", "3-6"]) as swarm:
        events = await swarm.train(aq_job.spec, aq_job.samples)
    losses = [step.loss for step in steps_of(events)]
    assert losses != exact, "the codec was in the way"
    assert np.allclose(losses, exact, rtol=0.01)


@pytest.mark.parametrize(
    ("fw", "bw", "key"),
    [
        ("fp16", "bf16", "fp16"),
        ("q2", "q2", "fp16"),
        ("aq2", "q4", "q8"),
        ("aq8", "none", "none"),
        ("aq2+z", "q2+z", "q4+z"),
        ("aqc0.5", "q4+ef", "qc0.25"),
        ("aqtop30", "top10+ef+z", "q4"),
        ("aq1.5c+z", "q3+ef21", "q8"),
        ("q3+z", "top30+ef21", "fp16"),
    ],
)
async def test_every_family_of_codecs_trains(
    make_job: MakeJob, tmp_path: Path, fw: str, bw: str, key: str
) -> None:
    job = make_job(num_samples=8, num_steps=4, forward_codec=fw, backward_codec=bw, key_codec=key)
    async with LocalSwarm(tmp_path, ["0-3", "3-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
    assert len(steps_of(events)) == 4
    sent = total(events, "forward_bytes", 3), total(events, "backward_bytes", 3)
    plain = 4 * 4 * job.spec.train.seq_length * job.spec.model.hidden_size * 4
    assert total(events, "forward_uncompressed_bytes", 3) == plain
    assert total(events, "backward_uncompressed_bytes", 3) == plain
    assert sent[0] < plain
    assert sent[1] < plain * (1.1 if bw == "none" else 1)


@pytest.mark.parametrize(
    ("way", "codecs", "waited_for", "num_samples"),
    [
        # In both steps of the second epoch 2 of 4 samples are sent in 2 bits a value, not 8;
        ("forward", {"forward_codec": "aq8"}, {"fill_codec": "aq2"}, 4),
        # in all four steps 2 of 4 samples' gradients.
        ("backward", {"backward_codec": "q8"}, {"drain_codec": "q2"}, 8),
    ],
    ids=["fills", "drains"],
)
async def test_what_all_wait_for_takes_fewer_bytes(
    make_job: MakeJob,
    tmp_path: Path,
    way: str,
    codecs: dict[str, str],
    waited_for: dict[str, str],
    num_samples: int,
) -> None:
    sent = []
    for number, other in enumerate(({}, waited_for)):
        job = make_job(num_samples=8, num_steps=4, **codecs, **other)
        folder = tmp_path / str(number)
        folder.mkdir()
        async with LocalSwarm(folder, ["0-3", "3-6"]) as swarm:
            events = await swarm.train(job.spec, job.samples)
            sent.append(total(events, f"{way}_bytes", 3))
    train, channels = job.spec.train, job.spec.model.hidden_size
    assert train.micro_batch_size == 2
    saved = num_samples * train.seq_length * channels * (8 - 2) / 8
    assert sent[0] - sent[1] == pytest.approx(saved, rel=0.01)
