"""Outcomes as tables: the worst of each kind, and each one."""

import json

from tests.fault_matrix.cells import Cell, Fault, Role
from tests.fault_matrix.table import as_dict, as_line, as_markdown
from tests.fault_matrix.trial import Outcome

QUICK = Outcome(
    cell=Cell(Role.LAST, "mid-frame", Fault.KILL), detection_s=0.11, recovery_s=0.7, difference=4e-8
)
SLOW = Outcome(
    cell=Cell(Role.LAST, "before-ack", Fault.KILL),
    detection_s=0.29,
    recovery_s=0.5,
    difference=2e-8,
)
UNSEEN = Outcome(
    cell=Cell(Role.CLIENT, "mid-backward", Fault.KILL), recovery_s=0.3, difference=3e-8
)
BROKEN = Outcome(cell=Cell(Role.FIRST, "mid-frame", Fault.DROP), problem="not over in 150 s")


def test_the_worst_of_each_kind_comes_first_and_then_each_outcome() -> None:
    summary, _, whole = as_markdown([QUICK, SLOW, UNSEEN, BROKEN]).partition("\n\n")
    assert summary.splitlines()[2:] == [
        "| first | drop | 1 | 0 | - | - | nan |",
        "| last | kill | 2 | 2 | 0.3 | 0.7 | 4e-08 |",
        "| client | kill | 1 | 1 | - | 0.3 | 3e-08 |",
    ]
    assert whole.splitlines()[2:] == [
        "| last | mid-frame | kill | 0.1 | 0.7 | 4e-08 | ok |",
        "| last | before-ack | kill | 0.3 | 0.5 | 2e-08 | ok |",
        "| client | mid-backward | kill | - | 0.3 | 3e-08 | ok |",
        "| first | mid-frame | drop | - | - | nan | not over in 150 s |",
    ]


def test_an_outcome_is_a_line_and_a_document() -> None:
    assert as_line(QUICK).split() == ["last:mid-frame:kill", "0.1", "0.7", "4e-08", "ok"]
    assert json.loads(json.dumps(as_dict(BROKEN), allow_nan=False)) == {
        "role": "first",
        "phase": "mid-frame",
        "fault": "drop",
        "detection_s": None,
        "recovery_s": None,
        "losses_differ_by": None,
        "problem": "not over in 150 s",
    }
