"""Whole encoded tensors, written down: every backend decodes them to the bits written beside them.

Run as a script, `python tests/conformance/test_codec_vectors.py`, it writes the table anew, by the
reference. That is for a new wire version; a backend that fails here is wrong, not the table.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from swarm_ft.codec import from_spec
from swarm_ft.codec.base import Codec
from swarm_ft.codec.basis import Basis, learn_basis
from swarm_ft.codec.codebook import CodebookCodec, learn_codebook
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.kernels.reference import ReferenceKernels
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from tests.conformance.conftest import Backend

TABLE = Path(__file__).with_name("codec_vectors.json")
FORWARD = (
    *("none", "none+z", "fp16", "fp16+z", "bf16", "q1c", "q2", "q3t", "q4f", "q5tc", "q8", "q3c+d"),
    *("aq1", "aq2c", "aq4", "aq8t", "aq3tc+d", "top10", "top30+z"),
    *("aqtop20", "q1+z", "q2.5+z", "q8c+z", "q3t+d+z", "aq2+z"),
    *("aq3tc+z", "aq6c+z", "aq2t+d+z", "qc0.25", "qc0.5t", "aqc0.5", "aqc0.1f", "aqc1tc+d"),
)
BACKWARD = ["q4+ef21", "top20+ef21+z", "q2+z", "q1t+d+z", "q1.2+z+last", "q3+last"]
SHAPES = ((9, 20), (1, 1), (130, 3))
ALONG = ("qk0.1", "aqk0.5")
"""Without a basis, and along one."""
WITH_CODEBOOK = ("q1.2+z+book", "q3+book")
"""Without a codebook, and with one."""


def sample(shape: tuple[int, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(torch.randn(shape[1], generator=generator).round())


def bits_of(x: Tensor) -> str:
    return x.contiguous().view(torch.int32).numpy().astype("<i4").tobytes().hex()


def base_of(codec: Codec, shape: tuple[int, int]) -> Tensor | None:
    return sample(shape, 2) if codec.spec.is_delta else None


def rows() -> Iterator[dict[str, Any]]:
    for direction, names in ((Direction.FORWARD, FORWARD), (Direction.BACKWARD, BACKWARD)):
        for name in names:
            codec = from_spec(parse_codec_spec(name, direction), ReferenceKernels())
            for shape in SHAPES:
                base = base_of(codec, shape)
                encoded = codec.encode(sample(shape, 1), base)
                y = codec.decode(encoded, base)
                yield row_of(name, shape, encoded, y)
    for name in ALONG:
        for shape in SHAPES:
            yield from rows_along(name, shape)
    for name in WITH_CODEBOOK:
        for shape in SHAPES:
            yield from rows_beside(name, shape)


def rows_along(name: str, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield rows without a basis, along one, and with a token whose codes no symbol has."""
    codec = from_spec(parse_codec_spec(name, Direction.FORWARD), ReferenceKernels())
    assert isinstance(codec, DirectionalCodec)
    base, is_first = base_of(codec, shape), not codec.spec.is_delta
    rows = 4 * sample((40, shape[1]), 3) + is_first
    basis = learn_basis([rows], codec.step_of(sample(shape, 1)), has_mean=is_first)
    assert basis is not None
    for way, massive in ((None, 1.0), (basis, 1.0), (basis, 5000.0)):
        x = sample(shape, 1)
        x[0] *= massive
        encoded = codec.with_side_info(way).encode(x, base)
        y = codec.with_side_info(way).decode(encoded, base)
        extra = {} if way is None else {"basis": way.data.hex()}
        yield row_of(name, shape, encoded, y) | extra


def rows_beside(name: str, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield rows without a codebook and with one of more than a byte's entries."""
    codec = from_spec(parse_codec_spec(name, Direction.BACKWARD), ReferenceKernels())
    assert isinstance(codec, CodebookCodec)
    basis = learn_codebook([sample((2048, shape[1]), 3)])
    assert basis is not None
    for way in (None, basis):
        encoded = codec.with_side_info(way).encode(sample(shape, 1))
        y = codec.with_side_info(way).decode(encoded)
        extra = {} if way is None else {"basis": way.data.hex()}
        yield row_of(name, shape, encoded, y) | extra


def row_of(name: str, shape: tuple[int, int], encoded: EncodedTensor, y: Tensor) -> dict[str, Any]:
    return {
        "codec": name,
        "shape": shape,
        "encoded": encoded.to_bytes().hex(),
        "decoded": bits_of(y),
    }


def table() -> list[dict[str, Any]]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else []


def cases() -> Iterator[ParameterSet]:
    """Every backend with every row.

    Long entropy-coded ones take Triton's interpreter a second each, and more than all the rest.
    """
    for row in table():
        encoded = EncodedTensor.from_bytes(bytes.fromhex(row["encoded"]))
        is_long = encoded.codec.entropy and row["shape"][0] > SHAPES[0][0]
        for backend in ("reference", "numba", "triton"):
            is_slow = is_long and backend == "triton"
            marks = [pytest.mark.slow, pytest.mark.variant] if is_slow else []
            along = "-along" * ("basis" in row)
            name = f"{backend}-{row['codec']}-{row['shape']}{along}"
            yield pytest.param(backend, row, id=name, marks=marks)


# Triton's interpreter computes with numpy, which warns of what is meant to become infinite.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("backend", "row"), list(cases()), indirect=["backend"])
def test_decodes_to_the_bits_of_the_table(backend: Backend, row: dict[str, Any]) -> None:
    if backend.device != "cpu":
        pytest.skip("payloads of codecs without a base are decoded on the CPU")
    encoded = EncodedTensor.from_bytes(bytes.fromhex(row["encoded"]))
    codec = from_spec(encoded.codec, backend.kernels)
    if "basis" in row and isinstance(codec, DirectionalCodec | CodebookCodec):
        codec = codec.with_side_info(
            Basis.from_bytes(bytes.fromhex(row["basis"]), encoded.channels)
        )
    y = codec.decode(encoded, base_of(codec, tuple(row["shape"])))
    assert bits_of(y) == row["decoded"]


def test_the_table_is_there() -> None:
    each = len(FORWARD) + len(BACKWARD) + 3 * len(ALONG) + 2 * len(WITH_CODEBOOK)
    assert len(table()) == len(SHAPES) * each


if __name__ == "__main__":
    TABLE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows()) + "\n]\n")
