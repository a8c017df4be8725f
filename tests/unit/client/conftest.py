"""Small sample checkpoint for all client tests that need a model."""

from __future__ import annotations

import pytest

from swarm_ft.client.demo_input import DemoInput, write_demo_input


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> DemoInput:
    directory = tmp_path_factory.mktemp("sample")
    return write_demo_input(directory, seed=3, num_layers=2, hidden_size=32)
