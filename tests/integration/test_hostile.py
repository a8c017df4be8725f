"""A few cells of the hostile suite; `make hostile` runs all of them."""

from pathlib import Path

import pytest

from tests.hostile import suite

CELLS = (
    "Cancel:client",
    "Cancel:owner",
    "Link:stranger",
    "ListChunks:replica",
    "03-says-non-finite",
)


@pytest.mark.thorough
async def test_attacks_come_to_nothing(tmp_path: Path) -> None:
    outcomes = [outcome async for outcome in suite.run_cells(CELLS, tmp_path / "hostile")]
    assert [outcome.cell for outcome in outcomes] == [*CELLS, suite.HONEST_RUNS]
    assert not [outcome for outcome in outcomes if outcome.problem]


@pytest.mark.thorough
async def test_a_swarm_without_a_rule_is_noticed(tmp_path: Path) -> None:
    from tests.hostile.mutations import mutations

    open_cancel = next(m for m in mutations() if m.name == "Cancel: everybody may")
    async with suite.scene_in(tmp_path / "hostile") as scene:
        cells = ("Cancel:owner", "Cancel:outsider")
        assert await suite.first_red(scene, cells) == ""
        assert await suite.first_red(scene, cells, open_cancel.change) == "Cancel:outsider"
