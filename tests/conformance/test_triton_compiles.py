"""The Triton kernels compile for real GPUs, here too, where there may be none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_triton.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [75, pytest.param(90, marks=pytest.mark.variant)])
def test_every_kernel_compiles_and_fuses_no_rounding_away(
    architecture: int, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, str(architecture)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert len(result["compiled"]) >= 14, result
    assert result["fused"] == []
