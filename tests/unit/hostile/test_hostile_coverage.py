"""Nothing that could be called, or was once done to a swarm, is left out of the suite."""

from pathlib import Path

import pytest

from swarm_ft.identity.roles import Role
from swarm_ft.transport import methods
from swarm_ft.transport.base import Method
from swarm_ft.transport.rules import RULES
from tests.hostile import attacks, outside, suite
from tests.hostile.callers import Kind
from tests.hostile.mutations import UNCHANGED, cells_of, mutations
from tests.hostile.table import BY_ROLE, TABLE, UNHEARD

ROLES = {
    Role.NEWCOMER: Kind.NEWCOMER,
    Role.CLIENT: Kind.CLIENT,
    Role.PEER: Kind.OUTSIDER,
    Role.RELAY: Kind.RELAY,
    Role.COORDINATOR: Kind.COORDINATOR,
}


def test_every_method_is_called_by_everybody() -> None:
    served = {value.name for value in vars(methods).values() if isinstance(value, Method)}
    assert {cells.method for cells in TABLE} == served
    for cells in TABLE:
        assert cells.row.keys() == set(Kind), cells.method


def test_roles_without_a_rule_are_refused_for_that() -> None:
    rows = {cells.method: cells.row for cells in TABLE}
    for path, allowed in RULES.items():
        for role, kind in ROLES.items():
            expected = rows[path.rpartition("/")[2]][kind]
            assert (expected in (BY_ROLE, UNHEARD)) == (role not in allowed), (path, role)


def test_all_numbers_of_the_list_are_there() -> None:
    names = (*attacks.ATTACKS, *outside.ATTACKS)
    numbered = {int(name.partition("-")[0]) for name in names if not name.startswith("Job:")}
    assert numbered | IN_UNIT_TESTS.keys() == set(range(1, 49))
    assert not numbered & IN_UNIT_TESTS.keys()
    every = (*suite.names(), *outside.ATTACKS)
    assert len(set(every)) == len(every)


IN_UNIT_TESTS = {
    44: "tests/unit/coordinator/test_recording.py",
    48: "tests/unit/coordinator/plan/test_allocation.py",
}
"""Attacks of benchmarks/reports/security.md that need no swarm, and where they are made."""


@pytest.mark.parametrize("name", IN_UNIT_TESTS.values())
def test_what_needs_no_swarm_is_elsewhere(name: str) -> None:
    assert (Path(__file__).parents[3] / name).exists()


def test_the_family_of_bad_jobs_is_whole() -> None:
    """It covers a job's name and texts, weights, model, result, and options."""
    family = {name for name in outside.ATTACKS if name.startswith("Job:") or "-job-" in name}
    for part in ("name", "texts", "nan", "huge", "private", "differs", "4096", "written", "bounds"):
        assert any(part in name for name in family), part


def test_every_rule_is_taken_away_and_somebody_is_there_to_notice() -> None:
    names = {mutation.name for mutation in mutations()}
    for path, allowed in RULES.items():
        method = path.rpartition("/")[2]
        assert f"{method}: everybody may" in names
        assert all(f"{method}: no {role} may" in names for role in allowed)
    for mutation in mutations():
        assert set(cells_of(mutation)) <= set(cells_of(UNCHANGED))
        assert cells_of(mutation), mutation.name
