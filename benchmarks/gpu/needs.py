"""The imports of a part that a bare machine may lack, and the packages to carry there."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GENERATED = Path(__file__).parents[2] / "swarm_ft" / "proto" / "boundary_pb2.py"
_MADE_BY = re.compile(r"^# Protobuf Python Version: ([0-9.]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Need:
    """A module.

    Attributes:
        module: as it is imported.
        package: as an index has it.
        least: its version, if an older one is known not to do.
    """

    module: str
    package: str
    least: str = ""

    @property
    def missing(self) -> str:
        """The package to carry there; empty if it is installed."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return self.package + f">={self.least}" * bool(self.least)
        found = version_of(self.package)
        if self.least and found and numbers_in(found) < numbers_in(self.least):
            return f"{self.package}>={self.least} (here is {found})"
        return ""


def _protobuf() -> Need:
    """Require the protobuf that generated the code, or a newer one."""
    made_by = _MADE_BY.search(GENERATED.read_text(encoding="utf-8"))
    return Need("google", "protobuf", made_by[1] if made_by else "")


NUMPY, NUMBA, XXHASH = Need("numpy", "numpy"), Need("numba", "numba"), Need("xxhash", "xxhash")
TORCH, TRITON = Need("torch", "torch", "2.4"), Need("triton", "triton")
CODECS = (TORCH, NUMPY, NUMBA, TRITON, _protobuf())
MODELS = (
    *(TORCH, NUMPY, NUMBA, XXHASH, _protobuf()),
    *(Need("transformers", "transformers", "5.0"), Need("safetensors", "safetensors")),
    *(Need("peft", "peft", "0.21"), Need("huggingface_hub", "huggingface-hub")),
    Need("tokenizers", "tokenizers"),
)
SWARM = (
    *MODELS,
    Need("grpc", "grpcio", "1.70"),
    Need("uvloop", "uvloop"),
    Need("fsspec", "fsspec"),
)


def missing(needs: Iterable[Need]) -> tuple[str, ...]:
    """Return the missing packages, each once."""
    return tuple(dict.fromkeys(filter(None, (need.missing for need in needs))))


def versions(needs: Iterable[Need]) -> Iterator[str]:
    """`package version` of those that are here."""
    for package in dict.fromkeys(need.package for need in needs):
        found = version_of(package)
        if found:
            yield f"{package} {found}"


def version_of(package: str) -> str:
    """Empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def numbers_in(text: str) -> tuple[int, ...]:
    """Read the numbers at the start of a version: `2.11.0+cu130` is (2, 11, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
