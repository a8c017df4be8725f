"""Every example runs as its reader would run it, and prints the output that it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWS = {
    "boundary_autograd": ("epoch 7  loss 0.0", "2.8 bits a value"),
    "torch_pipelining": ("epoch 7  loss 0.0", "4.9 bits a value"),
    "hivemind_compression": ("peer a: the mean, within", "4.0 bits a value"),
}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWS)
def test_an_example_shows_what_it_says(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in SHOWS[name]:
        assert words in done.stdout
