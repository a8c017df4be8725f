"""Real processes die, freeze and lose their links; the run ends with the quiet run's losses.

An eighth of the matrix: every role, every phase and every fault of a process is met, and every
role but the lone one is killed once; a kill takes longest, since somebody new has to be started.
`make faults` runs it all. What the net does beneath homes is met in
`tests/cli/test_cli_from_home.py`.
"""

from pathlib import Path

import pytest

from tests.fault_matrix.cells import PHASES, Fault, Role, chosen_cells
from tests.fault_matrix.matrix import run_matrix

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("swarm")]

CELLS = chosen_cells(
    (
        "first:before-forward:kill",
        "first:mid-frame:drop",
        "first:before-ack:drop",
        "middle:before-backward:drop",
        "middle:mid-backward:stop",
        "middle:commit-heard:kill",
        "last:after-backward:drop",
        "last:mid-weights:drop",
        "last:mid-reduce:kill",
        "last:before-ready:drop",
        "lone:saving:drop",
        "newcomer:joining:kill",
        "source:handing-over:kill",
        "coordinator:commit-written:drop",
        "coordinator:commit-said:kill",
        "coordinator:snapshot-saved:drop",
        "client:mid-backward:kill",
        "dht:mid-backward:kill",
    )
)


def test_the_cells_that_are_run_are_of_every_kind() -> None:
    assert {cell.role for cell in CELLS} == set(Role) - {Role.HOME}
    assert {cell.fault for cell in CELLS} == {Fault.KILL, Fault.STOP, Fault.DROP}
    assert {cell.phase for cell in CELLS} == set(PHASES)
    killed = {cell.role for cell in CELLS if cell.fault is Fault.KILL}
    assert killed == set(Role) - {Role.HOME, Role.LONE}


async def test_a_fault_anywhere_changes_no_loss(tmp_path: Path) -> None:
    outcomes = [outcome async for outcome in run_matrix(CELLS, tmp_path)]
    assert len(outcomes) == len(CELLS)
    assert [(str(o.cell), o.problem) for o in outcomes if o.problem] == []
