"""What `swarm-ft status` makes of a swarm's state."""

import pytest

from swarm_ft.cli.status import _document, _lines
from swarm_ft.ids import PeerId
from swarm_ft.protocol.coordinator_messages import StageAssignment
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec
from swarm_ft.protocol.status import RunPhase, RunStatus, SwarmStatus


@pytest.fixture
def found():
    """A run of one stage, which a second peer takes over."""
    model = ModelSpec(
        reference="m",
        architecture="gpt2",
        num_blocks=3,
        hidden_size=8,
        vocab_size=32,
        block_bytes=1,
        embed_digest=bytes(16),
        block_digests=(bytes(16),) * 3,
        head_digest=bytes(16),
        tied_embeddings=True,
    )
    train = TrainSpec(
        num_samples=8,
        seq_length=6,
        batch_size=4,
        micro_batch_size=2,
        num_steps=40,
        learning_rate=1e-2,
        lr_schedule=LrSchedule.CONSTANT,
        warmup_steps=0,
        weight_decay=0.0,
        clip_grad_norm=0.0,
        seed=0,
        shuffle=False,
        dropout=False,
        sync_tied_embeddings=False,
        forward_codec="none",
        backward_codec="none",
    )
    stages = (PeerId("old"), PeerId("new"))
    run = RunStatus(
        run_id="run-1",
        phase=RunPhase.TRAINING,
        detail="",
        committed_steps=9,
        spec=RunSpec(model=model, train=train),
        stages=tuple(StageAssignment(peer_id=p, layers=LayerRange(0, 3)) for p in stages),
        joining=(PeerId("new"),),
    )
    return SwarmStatus(members=(), runs=(run,))


def test_a_replica_that_takes_over_is_shown_as_joining(found):
    assert "  layers 0-3  old, new (joining)" in list(_lines(found))
    (run,) = _document(found)["runs"]
    assert [(stage["peer"], stage["joining"]) for stage in run["stages"]] == [
        ("old", False),
        ("new", True),
    ]
