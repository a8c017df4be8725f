"""What `swarm-ft status` makes of a swarm's state."""

import pytest

from swarm_ft.cli.status import _document, _lines
from swarm_ft.ids import PeerId
from swarm_ft.protocol.coordinator_messages import StageAssignment
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.status import RunPhase, RunStatus, SwarmStatus
from tests.specs import run_spec


@pytest.fixture
def found():
    """A run of one stage, which a second peer takes over."""
    stages = (PeerId("old"), PeerId("new"))
    run = RunStatus(
        run_id="run-1",
        phase=RunPhase.TRAINING,
        detail="",
        committed_steps=9,
        spec=run_spec(num_blocks=3, num_steps=40),
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
