"""Both ways in which a joint moves bytes."""

import os

import pytest


@pytest.fixture(params=["spliced", "copied"])
def way_of_moving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "copied":
        monkeypatch.delattr(os, "splice", raising=False)
