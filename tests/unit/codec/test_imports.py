"""The codecs are a library of their own: whoever imports them loads no network, and specs no torch.

`lint-imports` checks their source; these tests check processes.
"""

import subprocess
import sys

_PRINT_MODULES = "import sys; print(*sys.modules, sep=chr(10))"
_ALL_MODULES = """
import importlib, importlib.util, pkgutil, swarm_ft.codec
skipped = {"swarm_ft.codec.for_hivemind"}
if importlib.util.find_spec("triton") is None:
    skipped |= {f"swarm_ft.codec.kernels.cuda{end}" for end in ("", "_grid", "_trellis")}
for found in pkgutil.walk_packages(swarm_ft.codec.__path__, "swarm_ft.codec."):
    if found.name not in skipped:
        importlib.import_module(found.name)
"""


def loaded_by(program: str) -> set[str]:
    words = [sys.executable, "-c", f"{program}\n{_PRINT_MODULES}"]
    return set(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split())


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_the_codecs_load_no_network() -> None:
    loaded = loaded_by(_ALL_MODULES)
    assert {"swarm_ft.codec.factory", "swarm_ft.codec.codebook", "torch", "numba"} <= loaded
    assert not packages(loaded) & {"grpc", "hivemind", "transformers", "aiohttp"}
    assert "google.protobuf" not in loaded
    allowed = {"swarm_ft", "swarm_ft.codec", "swarm_ft.errors", "swarm_ft.ids", "swarm_ft.digest"}
    ours = {name for name in loaded if packages({name}) == {"swarm_ft"}}
    assert {name for name in ours if not name.startswith("swarm_ft.codec.")} <= allowed


def test_specs_load_no_torch() -> None:
    loaded = loaded_by("import swarm_ft.codec, swarm_ft.codec.tensor")
    assert "swarm_ft.codec.spec" in loaded
    assert not packages(loaded) & {"torch", "numpy", "numba"}


def test_a_codec_comes_from_the_package_itself() -> None:
    program = """
import torch
from swarm_ft.codec import from_spec
from swarm_ft.codec.spec import Direction, parse_codec_spec
x = torch.ones(2, 8)
_, value = from_spec(parse_codec_spec("fp16", Direction.BACKWARD)).encode_and_decode(x)
assert torch.equal(value, x)
"""
    assert not packages(loaded_by(program)) & {"grpc", "hivemind"}
