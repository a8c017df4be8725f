"""Small sample checkpoint for all client tests that need a model."""

from __future__ import annotations

import pytest

from swarm_ft.client.sample import SampleInput, write_sample


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleInput:
    directory = tmp_path_factory.mktemp("sample")
    return write_sample(directory, seed=3, num_layers=2, hidden_size=32)
