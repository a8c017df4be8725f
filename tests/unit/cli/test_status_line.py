"""The line that a volunteer reads about its machine's work."""

from swarm_ft.base.systems import resident_bytes
from swarm_ft.cli.status_line import Meter, doing_words
from swarm_ft.ids import RunId
from swarm_ft.peer.current_work import RunWork
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.reach.shaping import Gate


def test_its_part_of_a_run_is_told() -> None:
    doing = RunWork(run_id=RunId("run-1"), layers=LayerRange(2, 4), step=1200, num_steps=4000)
    assert doing_words(doing) == "run-1  layers 2-4  step 1,200/4,000"
    sharing = RunWork(
        run_id=RunId("run-1"),
        layers=LayerRange(2, 4),
        step=1,
        num_steps=9,
        samples=3,
        batch=8,
    )
    assert doing_words(sharing) == "run-1  layers 2-4  step 1/9  3 of 8 samples per step"


def test_a_meter_tells_how_fast_bytes_pass_and_how_many_did() -> None:
    gate = Gate()
    meter = Meter(gate)
    assert meter.words(10.0) == ""
    gate.wait(500_000)
    assert meter.words(12.0) == "2.0 Mbps (500.0 kB)"
    assert meter.words(13.0) == "0.0 Mbps (500.0 kB)"
    gate.wait(500_000)
    assert meter.words(13.0) == "0.0 Mbps (1.0 MB)", "at the same moment"


def test_a_process_knows_what_memory_it_takes() -> None:
    resident = resident_bytes()
    assert resident is None or resident > 1 << 20
