import subprocess
import sys


def test_only_the_dht_module_brings_in_hivemind_and_torch() -> None:
    program = "import swarm_ft.discovery, swarm_ft.discovery.directory, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "swarm_ft.discovery.directory" in loaded
    assert not {"hivemind", "torch", "grpc", "swarm_ft.discovery.dht"} & set(loaded)
