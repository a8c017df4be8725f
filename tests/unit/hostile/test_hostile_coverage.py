"""Nothing that could be called, or was once done to a swarm, is left out of the suite."""

from swarm_ft.identity.roles import Role
from swarm_ft.transport import methods
from swarm_ft.transport.base import Method
from swarm_ft.transport.rules import RULES
from tests.hostile import attacks, processes, suite
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
    names = (*attacks.ATTACKS, *processes.ATTACKS)
    assert {int(name.partition("-")[0]) for name in names} == set(range(1, 30))
    every = (*suite.names(), *processes.ATTACKS)
    assert len(set(every)) == len(every)


def test_every_rule_is_taken_away_and_somebody_is_there_to_notice() -> None:
    names = {mutation.name for mutation in mutations()}
    for path, allowed in RULES.items():
        method = path.rpartition("/")[2]
        assert f"{method}: everybody may" in names
        assert all(f"{method}: no {role} may" in names for role in allowed)
    for mutation in mutations():
        assert set(cells_of(mutation)) <= set(cells_of(UNCHANGED))
        assert cells_of(mutation), mutation.name
