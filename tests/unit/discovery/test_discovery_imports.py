import subprocess
import sys

import pytest


def test_only_the_dht_module_brings_in_hivemind_and_torch() -> None:
    program = "import swarm_ft.discovery, swarm_ft.discovery.directory, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "swarm_ft.discovery.directory" in loaded
    assert not {"hivemind", "torch", "grpc", "swarm_ft.discovery.dht"} & set(loaded)


@pytest.mark.thorough
def test_a_dht_node_brings_in_no_more_of_hivemind_and_all_of_it_is_there_for_who_asks() -> None:
    program = (
        "import swarm_ft.discovery.dht, sys; before = set(sys.modules); "
        "print(*(m for m in before if m.startswith(('hivemind.', 'scipy')))); "
        "import hivemind; print(hivemind.DHT.__name__, hivemind.Optimizer.__name__, "
        "hivemind.__version__[:2], hasattr(hivemind, 'nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert "hivemind.dht.node" in first.split()
    assert not [m for m in first.split() if m.startswith(("hivemind.optim", "scipy"))]
    assert second == "DHT Optimizer 1. False"
