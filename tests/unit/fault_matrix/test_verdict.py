"""A run with a fault is judged by what its watcher saw."""

import pytest

from swarm_ft.errors import BadOption, ProtocolError
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.client import StepCommitted
from tests.fault_matrix.cells import Cell, Fault, Role, all_cells, chosen_cells
from tests.fault_matrix.verdict import Observed, problems_of, relative_difference

PEER = Cell(Role.MIDDLE, "mid-backward", Fault.KILL)


def step(number: int, loss: float) -> StepCommitted:
    return StepCommitted(
        step=StepNumber(number),
        loss=loss,
        learning_rate=1e-3,
        grad_norm=1.0,
        num_samples=8,
        seconds=1.0,
        traffic=(),
    )


def observed(
    *losses: tuple[int, float],
    cell: Cell = PEER,
    quiet: tuple[float, ...] = (4.0, 3.0, 2.0),
    detection_s: float = 0.1,
) -> Observed:
    events = tuple(step(*loss) for loss in losses)
    return Observed(cell=cell, events=events, quiet=quiet, detection_s=detection_s)


RIGHT = ((0, 4.0), (1, 3.0), (2, 2.0))


def test_a_run_as_the_quiet_one_is_in_order() -> None:
    assert problems_of(observed((0, 4.00001), (1, 3.0), (2, 2.0))) == ""
    assert relative_difference(observed(*RIGHT)) == 0


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (((0, 4.0), (1, 3.0)), "2 steps count, not 3"),
        (((0, 4.0), (1, 3.001), (2, 2.0)), "losses differ by 3.3e-04"),
        (((0, 4.0), (1, 3.0), (1, 3.0), (2, 2.0)), "step 1 was committed twice"),
        (((0, 4.0), (1, float("nan")), (2, 2.0)), "losses differ by nan"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(losses: tuple[tuple[int, float], ...], words: str) -> None:
    assert words in problems_of(observed(*losses))


def test_a_step_that_is_missing_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="expected step 1"):
        problems_of(observed((0, 4.0), (2, 2.0)))


@pytest.mark.parametrize(
    ("fault", "detection_s", "is_late"),
    [(Fault.KILL, 2.9, False), (Fault.DROP, 3.1, True), (Fault.STOP, 9.9, False)],
    ids=str,
)
def test_detection_has_its_limit(fault: Fault, detection_s: float, is_late: bool) -> None:
    cell = Cell(Role.FIRST, "mid-frame", fault)
    found = problems_of(observed(*RIGHT, cell=cell, detection_s=detection_s))
    assert ("detected after" in found) is is_late


def test_only_a_new_coordinator_tells_steps_again_and_never_another_loss() -> None:
    coordinator = Cell(Role.COORDINATOR, "commit-said", Fault.KILL)
    again = ((0, 4.0), (1, 3.0), (0, 4.0), (1, 3.0), (2, 2.0))
    assert problems_of(observed(*again, cell=coordinator)) == ""
    assert "twice" in problems_of(observed(*again))
    changed = ((0, 4.0), (1, 3.0), (0, 4.0), (1, 3.00001), (2, 2.0))
    assert "step 1 was committed twice" in problems_of(observed(*changed, cell=coordinator))


def test_a_run_may_go_back_where_a_stage_lost_its_last_peer() -> None:
    lone = Cell(Role.LONE, "mid-backward", Fault.KILL)
    assert problems_of(observed((0, 4.0), (1, 3.0), *RIGHT, cell=lone)) == ""


def test_cells_are_chosen_by_patterns() -> None:
    assert len(set(all_cells())) == len(list(all_cells())) == len(chosen_cells(()))
    chosen = chosen_cells(("middle:mid-*:kill", "dht:commit-heard:*"))
    assert set(map(str, chosen)) == {
        *(f"middle:mid-{phase}:kill" for phase in ("frame", "backward", "weights", "reduce")),
        *(f"dht:commit-heard:{fault}" for fault in ("kill", "stop")),
    }
    with pytest.raises(BadOption, match=r"--cells moon:\*"):
        chosen_cells(("moon:*",))
