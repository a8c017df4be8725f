"""A committed table of what decoders' kernels return, to the bit: no backend may ever change it.

`python tests/conformance/test_kernel_vectors.py` writes `vectors.json` from the reference. That is
for a new kernel; a changed line means that frames of one version decode differently in another.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarm_ft.codec.kernels.base import Coded, NarrowGrid, Scales, WideGrid
from swarm_ft.codec.kernels.reference import ReferenceKernels
from tests.conformance.conftest import Backend

TABLE = Path(__file__).with_name("vectors.json")
BITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
Case = tuple[str, str, tuple[Any, ...]]
"""A kernel, a name, and arguments."""
RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (Coded, NarrowGrid, Scales, WideGrid)}


def to_json(x: Any) -> Any:
    """Tensors as shape, type and the bits of each value in hex; records by name."""
    if isinstance(x, torch.Tensor):
        bits = x.contiguous().numpy().reshape(-1).view(BITS[x.element_size()])
        digits = 2 * x.element_size()
        text = " ".join(f"{int(value):0{digits}x}" for value in bits)
        return {"tensor": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "bits": text}
    if type(x).__name__ in RECORDS:
        names = type(x).__dataclass_fields__
        return {type(x).__name__: {name: to_json(getattr(x, name)) for name in names}}
    return [to_json(part) for part in x] if isinstance(x, tuple) else x


def from_json(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(from_json(part) for part in x)
    if isinstance(x, dict) and "tensor" in x:
        dtype = np.dtype(x["tensor"])
        bits = np.array([int(value, 16) for value in x["bits"].split()], BITS[dtype.itemsize])
        return torch.from_numpy(bits.view(dtype)).view(x["shape"])
    if isinstance(x, dict):
        ((name, values),) = x.items()
        return RECORDS[name](**{key: from_json(value) for key, value in values.items()})
    return x


def rows_of(text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(text)["vectors"]
    return rows


def line(row: dict[str, Any]) -> str:
    return f"{row['kernel']} {row['case']}"


@pytest.mark.parametrize("row", rows_of(TABLE.read_text()) if TABLE.exists() else [], ids=line)
def test_backends_return_what_is_in_the_table(backend: Backend, row: dict[str, Any]) -> None:
    result = backend(row["kernel"], *from_json(row["args"]))
    assert to_json(result) == row["result"]


def test_table_covers_what_decoders_call() -> None:
    kernels = {row["kernel"] for row in rows_of(TABLE.read_text())}
    assert kernels == {
        "unpack",
        "dequantize",
        "flip_signs",
        "slice_contexts",
        "shifts_of",
        "decode_symbols",
    }


def cases() -> Iterator[Case]:
    """Kernel, name and arguments of each line, made anew."""
    generator = torch.Generator().manual_seed(20240607)
    for bits in range(1, 9):
        packed = torch.randint(0, 256, (2 * bits,), generator=generator).to(torch.uint8)
        yield "unpack", f"{bits} bits", (packed, 13, bits)
    yield from narrow_cases(generator)
    yield from wide_cases(generator)
    yield from coded_cases(generator)
    for seed in (0, 77, 2**32 - 1):
        codes = torch.tensor([0, 1, -1, 2047, -32768, 32767]).to(torch.int16).repeat(3, 4)
        yield "flip_signs", f"seed {seed}", (codes, seed)
        shifts = torch.arange(codes.numel()).remainder(3).remainder(2).to(torch.uint8)
        yield "flip_signs", f"seed {seed}, shifted", (codes, seed, shifts)
        for slices in range(1, 5):
            classes = torch.arange(40).remainder(15).to(torch.uint8)
            yield "slice_contexts", f"{slices} slices, seed {seed}", (classes, seed, slices)


def some_scales(generator: torch.Generator, rows: int, cols: int) -> Scales:
    """Draw scales of all magnitudes and both signs; the last column's is 0."""
    powers = 2.0 ** torch.randint(-30, 31, (cols,), generator=generator)
    scales = (torch.randn(cols, generator=generator) * powers).bfloat16().float()
    if cols > 1:
        scales[-1] = 0.0
    return Scales(torch.randn(rows, generator=generator).bfloat16().float(), scales)


def narrow_cases(generator: torch.Generator) -> Iterator[Case]:
    for bits in range(1, 9):
        codes = torch.randint(0, 1 << bits, (3, 7), generator=generator).to(torch.uint8)
        base = torch.randn(3, 7, generator=generator)
        for rows, cols in ((1, 7), (3, 1), (3, 7)):
            scales = some_scales(generator, rows, cols)
            name = f"{bits} bits, {rows} x {cols} scales"
            yield "dequantize", name, (codes, None, scales, NarrowGrid(bits))
            dithered = NarrowGrid(bits, 0x9ABCDEF0 + bits)
            yield "dequantize", f"{name}, base, dither", (codes, base, scales, dithered)


def wide_cases(generator: torch.Generator) -> Iterator[Case]:
    codes = torch.tensor(
        [0, 1, -1, 2, 2047, -2047, 2048, -2048, 2063, -2063, 32752, -32752, -32768]
    )
    codes = torch.stack([codes, codes.flip(0)]).to(torch.int16)
    base = torch.randn(codes.shape, generator=generator)
    scales = some_scales(generator, 2, codes.shape[1])
    for shrink in range(16):
        yield "dequantize", f"wide, shrink {shrink}", (codes, None, scales, WideGrid(shrink))
    yield "dequantize", "wide, base", (codes, base, scales, WideGrid(5))
    yield "dequantize", "wide, base, dither", (codes, base, scales, WideGrid(seed=77))
    shifts = torch.arange(codes.numel()).remainder(3).remainder(2).to(torch.uint8)
    grid = WideGrid(seed=77, shifts=shifts)
    yield "dequantize", "wide, base, dither, shifted", (codes, base, scales, grid)


def coded_cases(generator: torch.Generator) -> Iterator[Case]:
    frequencies = torch.zeros(2, 256, dtype=torch.int32)
    frequencies[0, torch.tensor([0, 3, 128, 255])] = torch.tensor([1, 3000, 95, 1000]).int()
    frequencies[1, torch.tensor([5, 6])] = torch.tensor([4095, 1]).int()
    for count, lanes in ((1, 1), (13, 4), (75, 32)):
        contexts = torch.randint(0, 2, (count,), generator=generator).to(torch.uint8)
        picks = torch.randint(0, 4, (count,), generator=generator)
        options = torch.tensor([[0, 3, 128, 255], [5, 5, 5, 6]])
        symbols = options[contexts.long(), picks].to(torch.uint8)
        yield "shifts_of", f"{count} in {lanes} lanes", (symbols, lanes)
        coded = ReferenceKernels().encode_symbols(symbols, contexts, frequencies, lanes)
        yield "decode_symbols", f"{count} in {lanes} lanes", (coded, contexts, frequencies)
        yield "decode_symbols", f"{count} shifted", (coded, contexts, frequencies, 1)
        short = Coded(coded.states, coded.counts.clamp(max=1), coded.words[:1])
        if count > 1:
            yield "decode_symbols", f"{count} cut short", (short, contexts, frequencies)


def written() -> str:
    rows = []
    for kernel, case, args in cases():
        result = getattr(ReferenceKernels(), kernel)(*args)
        row = {"kernel": kernel, "case": case, "args": to_json(args), "result": to_json(result)}
        rows.append(json.dumps(row))
    return '{"vectors": [\n' + ",\n".join(rows) + "\n]}\n"


if __name__ == "__main__":
    TABLE.write_text(written())
