"""Kernels and codecs to the bit: Triton and Numba beside plain torch, and torch on the GPU too.

What decoders call has to return the reference's bits, whatever bytes it gets; what encoders call
may round as it likes, and is held to a tolerance. On a GPU codecs encode and decode there, as a
stage on it does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from benchmarks.gpu.kernel_cases import Case, groups
from benchmarks.gpu.needs import numbers_in, version_of
from benchmarks.gpu.parts import Scene
from benchmarks.gpu.pool import Task, done_in_processes
from benchmarks.gpu.report import Row
from swarm_ft.codec import Codec, from_spec, pack_buffer, unpack_buffer
from swarm_ft.codec.basis import Basis
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import Kernels
from swarm_ft.codec.kernels.cpu import NumbaKernels
from swarm_ft.codec.kernels.reference import ReferenceKernels
from swarm_ft.codec.spec import CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame

VECTORS = Path(__file__).parents[2] / "tests" / "conformance" / "codec_vectors.json"
CPU = torch.device("cpu")
T = TypeVar("T")
SHAPES = ((9, 20), (1, 1), (130, 3), (1, 4097), (33, 1601), (1023, 130), (128, 96))
REHEARSED_SHAPES = SHAPES[:2]
REHEARSED_CODECS = ("q3t", "aq4", "q2", "aq2+z", "top10", "aqtop20", "q4+ef21", "aqk0.5")
MOST_WORSE, MOST_WORSE_OF_FEW = 1.02, 1.1
"""Of an encoder's error, beside the reference's; where values are few, a scale is of fewer still.
"""
FLIPS = 6


@dataclass(frozen=True, slots=True)
class Place:
    """Kernels, and where their tensors are; all else sees tensors on the CPU.

    Attributes:
        has_codecs: whether stages there encode with these kernels.
    """

    name: str
    kernels: Kernels
    device: torch.device
    has_codecs: bool = True

    def call(self, kernel: str, args: Sequence[object]) -> object:
        """Call a kernel on this device and return its result on the CPU."""
        return _moved(getattr(self.kernels, kernel)(*(_moved(a, self.device) for a in args)), CPU)

    def codec(self, spec: CodecSpec) -> Codec:
        """Make the codec as a stage on this device does."""
        return from_spec(spec, self.kernels if self.device == CPU else None)

    def encoded(self, spec: CodecSpec, x: Tensor, base: Tensor | None) -> EncodedTensor:
        """Encode a tensor on this device."""
        return self.codec(spec).encode(x.to(self.device), _moved(base, self.device))

    def sent(self, spec: CodecSpec, x: Tensor, base: Tensor | None) -> tuple[EncodedTensor, Tensor]:
        """Encode a tensor and return also the value that its sender assumes."""
        here = x.to(self.device), _moved(base, self.device)
        encoded, value = self.codec(spec).encode_and_decode(*here)
        return encoded, value.cpu()

    def decoded(
        self, encoded: EncodedTensor, base: Tensor | None, basis: Basis | None = None
    ) -> Tensor:
        """Decode a tensor on this device, along a basis if it names one."""
        codec = self.codec(encoded.codec)
        if isinstance(codec, DirectionalCodec):
            codec = codec.with_side_info(basis)
        return codec.decode(encoded, _moved(base, self.device), device=self.device).cpu()


@dataclass
class Tally:
    """Checks of one kind.

    Attributes:
        seconds: that they took, with what was compiled for them.
    """

    table: str
    name: str
    place: Place
    checks: int = 0
    wrong: int = 0
    first: str = ""
    seconds: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)

    def check(self, find: Callable[..., str], *args: object) -> None:
        """Count a check that finds trouble, or nothing if all is as it should be."""
        began_s = time.monotonic()
        trouble = tried(find, *args)
        self.seconds += time.monotonic() - began_s
        self.checks += 1
        self.wrong += bool(trouble)
        self.first = self.first or trouble

    def row(self) -> Row:
        """Return the row of the report."""
        return {
            "table": self.table,
            "what": self.name,
            "where": self.place.name,
            "checks": self.checks,
            "wrong": self.wrong,
            "s": self.seconds,
            "first": self.first,
            **self.notes,
        }


def rows(scene: Scene) -> Iterator[Row]:
    """Yield the results of kernels, codecs and stored buffers as they are done."""
    if left_out := interpreter_trouble():
        yield {"table": "trouble", "what": "triton, interpreted", "first": left_out}
    yield from done_in_processes(_tasks(few=scene.rehearse), scene)


def _tasks(*, few: bool) -> list[Task]:
    """Order the tasks, the longest first: Triton compiles a kernel for each kind of call."""
    kernels = [
        Task(f"{kernel}, {name}", partial(_kernel_rows, kernel, name, few=few))
        for name, group in groups(few=few).items()
        for kernel in group.kernels
    ]
    slow, quick = list[Task](), list[Task]()
    for spec in _codecs(few=few):
        task = Task(str(spec), partial(_codec_rows, spec, few=few))
        (slow if spec.entropy or spec.has_side_info else quick).append(task)
    return [*slow, *kernels, *quick, Task("stored buffers", _stored_rows)]


def places() -> list[Place]:
    """All that are held to plain torch on the CPU."""
    from swarm_ft.codec.kernels.cuda import TritonKernels

    if not torch.cuda.is_available():
        interpreted = Place("triton, interpreted", TritonKernels(), CPU)
        return [LOOPS] if interpreter_trouble() else [LOOPS, interpreted]
    gpu = torch.device("cuda")
    plain = Place("torch on the GPU", ReferenceKernels(), gpu, has_codecs=False)
    return [LOOPS, Place("triton", kernels_for("cuda"), gpu), plain]


def interpreter_trouble() -> str:
    """Why Triton's kernels do not run without a GPU here; empty if they do, or there is one.

    Before 3.7 its interpreter reads the bounds of loops as numpy does not allow since 2.4.
    """
    triton, numpy = version_of("triton"), version_of("numpy")
    is_old = numbers_in(triton) < (3, 7) and numbers_in(numpy) >= (2, 4)
    if torch.cuda.is_available() or not is_old:
        return ""
    return f"left out: Triton {triton}'s interpreter needs numpy below 2.4 (here is {numpy})"


REFERENCE, LOOPS = Place("torch", ReferenceKernels(), CPU), Place("numba", NumbaKernels(), CPU)
MOST_JUDGED = 2000
"""Values of tensors that plain torch judges, whose decoder of symbols is slow."""


def judge_of(x: Tensor) -> Place:
    """Choose the reference: plain torch, or for large tensors Numba, which plain torch tests."""
    return REFERENCE if x.numel() <= MOST_JUDGED else LOOPS


# ---- kernels


def _kernel_rows(kernel: str, group: str, *, few: bool) -> list[Row]:
    tallies = [Tally("kernels", f"{kernel}, {group}", place) for place in places()]
    for case in groups(few=few)[group].cases(kernel):
        expected = REFERENCE.call(case.kernel, case.args)
        for tally in tallies:
            tally.check(_kernel_trouble, case, tally.place, expected)
    return [tally.row() for tally in tallies]


def _kernel_trouble(case: Case, place: Place, expected: object) -> str:
    found = place.call(case.kernel, case.args)
    difference = case.difference(found, expected)
    return f"{case.name}: {difference}" if difference else ""


def tried(check: Callable[..., str], *args: object) -> str:
    """Return a check's finding, or the error that ended it."""
    try:
        return check(*args)
    except Exception as error:  # noqa: BLE001 - whatever a kernel does is to be told
        return f"{type(error).__name__}: {error}"[:200]


# ---- codecs


def _codecs(*, few: bool) -> list[CodecSpec]:
    """All that the table of written vectors has, each once."""
    found: dict[str, CodecSpec] = {}
    for row in json.loads(VECTORS.read_text(encoding="utf-8")):
        encoded = EncodedTensor.from_bytes(bytes.fromhex(row["encoded"]))
        found.setdefault(row["codec"], encoded.codec)
    return [spec for name, spec in found.items() if not few or name in REHEARSED_CODECS]


def _codec_rows(spec: CodecSpec, *, few: bool) -> list[Row]:
    shapes = REHEARSED_SHAPES if few else SHAPES
    there = [place for place in places() if place.has_codecs]
    found = [_vectors(spec, place, shapes) for place in there]
    tallies = [Tally("codecs", str(spec), place) for place in there]
    for number, shape in enumerate(shapes):
        expected = Expected.of(spec, shape, number, 1 if few else FLIPS)
        for tally in tallies:
            _check_codec(spec, tally, expected)
            tally.notes["of"] = len(shapes)
    return [tally.row() for tally in (*found, *tallies)]


def _check_codec(spec: CodecSpec, tally: Tally, expected: Expected) -> None:
    tally.check(_encoder_trouble, spec, tally.place, expected)
    same = not tried(_bytes_trouble, tally.place, expected)
    tally.notes["same bytes"] = tally.notes.get("same bytes", 0) + same
    for hostile, verdict_there in expected.hostile:
        tally.check(_hostile_trouble, tally.place, hostile, expected.base, verdict_there)


def _vectors(spec: CodecSpec, place: Place, shapes: Sequence[tuple[int, int]]) -> Tally:
    tally = Tally("written vectors", str(spec), place)
    for row in json.loads(VECTORS.read_text(encoding="utf-8")):
        encoded = EncodedTensor.from_bytes(bytes.fromhex(row["encoded"]))
        if encoded.codec == spec and tuple(row["shape"]) in shapes:
            tally.check(_vector_trouble, row, encoded, place)
    return tally


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The reference's results for a tensor, the same for all places.

    Attributes:
        base: None if the codec takes none.
        error: of what it encodes.
        hostile: damaged forms of that, and what they come to.
    """

    x: Tensor
    base: Tensor | None
    encoded: EncodedTensor
    error: float
    hostile: Sequence[tuple[EncodedTensor, Tensor | BadFrame]]

    @classmethod
    def of(cls, spec: CodecSpec, shape: tuple[int, int], seed: int, flips: int) -> Expected:
        """Compute the reference's results for a drawn tensor."""
        x, base = sample(shape, 2 * seed), sample(shape, 2 * seed + 1)
        used = base if spec.is_delta else None
        judge = judge_of(x)
        encoded = judge.encoded(spec, x, used)
        hostile = [(h, verdict(judge, h, used)) for h in damaged(encoded, seed, flips)]
        error = float((judge.decoded(encoded, used) - x).norm())
        return cls(x=x, base=used, encoded=encoded, error=error, hostile=hostile)


def _vector_trouble(row: dict[str, Any], encoded: EncodedTensor, place: Place) -> str:
    shape = encoded.tokens, encoded.channels
    base = written_sample(shape, 2) if encoded.codec.is_delta else None
    basis = row.get("basis")
    along = None if basis is None else Basis.from_bytes(bytes.fromhex(basis), encoded.channels)
    y = place.decoded(encoded, base, along).contiguous().view(torch.int32).numpy()
    return "" if y.astype("<i4").tobytes().hex() == row["decoded"] else f"{shape}: other bits"


def _encoder_trouble(spec: CodecSpec, place: Place, expected: Expected) -> str:
    """Check that both sides decode its output alike, and no worse than the reference's output."""
    x, base = expected.x, expected.base
    encoded, value = place.sent(spec, x, base)
    y = judge_of(x).decoded(encoded, base)
    if not equal(place.decoded(encoded, base), y):
        return f"{list(x.shape)}: decodes to other bits than the reference"
    if not equal(value, y):
        return f"{list(x.shape)}: its sender has another value than the reference reads"
    error = float((y - x).norm())
    most_worse = MOST_WORSE if x.numel() > MOST_JUDGED else MOST_WORSE_OF_FEW
    if error > most_worse * expected.error + 1e-6 * float(x.norm()):
        return f"{list(x.shape)}: an error of {error:.4g}; the reference's is {expected.error:.4g}"
    return ""


def _bytes_trouble(place: Place, expected: Expected) -> str:
    found = place.encoded(expected.encoded.codec, expected.x, expected.base)
    return "" if found.payload == expected.encoded.payload else "other bytes"


def _hostile_trouble(
    place: Place, encoded: EncodedTensor, base: Tensor | None, expected: Tensor | BadFrame
) -> str:
    found = verdict(place, encoded, base)
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return "" if equal(found, expected) else "hostile bytes: other bits"
    return "" if type(found) is type(expected) else f"hostile bytes: {found!r}, not {expected!r}"


def verdict(place: Place, encoded: EncodedTensor, base: Tensor | None) -> Tensor | BadFrame:
    """Decode bytes of a stranger and return the tensor or the refusal."""
    try:
        return place.decoded(encoded, base)
    except BadFrame as error:
        return error


def damaged(encoded: EncodedTensor, seed: int, flips: int) -> Iterator[EncodedTensor]:
    """Yield damaged versions of a tensor, as a stranger might send them."""
    generator, payload = torch.Generator().manual_seed(seed), encoded.payload
    for _ in range(flips):
        bit = int(torch.randint(0, 8 * len(payload), (), generator=generator))
        changed = bytearray(payload)
        changed[bit // 8] ^= 1 << bit % 8
        yield _with(encoded, bytes(changed))
    drawn = torch.randint(0, 256, (len(payload),), generator=generator).to(torch.uint8)
    yield _with(encoded, drawn.numpy().tobytes())
    yield _with(encoded, payload[:-1])
    yield _with(encoded, bytes(len(payload)))


def _with(encoded: EncodedTensor, payload: bytes) -> EncodedTensor:
    return EncodedTensor(encoded.codec, encoded.tokens, encoded.channels, payload)


# ---- stored buffers


def _stored_rows() -> list[Row]:
    """Compare the buffers that a stage on each device packs and unpacks with the CPU's."""
    found = []
    for place, bits in product((p for p in places() if p.has_codecs), (16, 8, 4)):
        found.append(tally := Tally("stored buffers", f"{bits} bits", place))
        for number, shape in enumerate(SHAPES):
            x = sample(shape, 50 + number)
            tally.check(_stored_trouble, x, bits, place.device, pack_buffer(x, bits))
    return [tally.row() for tally in found]


def _stored_trouble(x: Tensor, bits: int, device: torch.device, expected: bytes) -> str:
    if pack_buffer(x.to(device), bits) != expected:
        return f"{list(x.shape)}: other bytes"
    size = x.shape[0], x.shape[1], bits
    there, here = (
        unpack_buffer(expected, *size, device=device).cpu(),
        unpack_buffer(expected, *size),
    )
    return "" if equal(there, here) else f"{list(x.shape)}: other bits"


# ---- tensors


def written_sample(shape: tuple[int, int], seed: int) -> Tensor:
    """Draw a tensor as `tests/conformance/test_codec_vectors.py` does."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(torch.randn(shape[1], generator=generator).round())


sample = written_sample


def equal(one: Tensor, other: Tensor) -> bool:
    """Compare bits: 0 is not -0."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def _moved(x: T, device: torch.device) -> T:
    """Return the same value with all its tensors on the device."""
    moved: Any = x
    if isinstance(x, Tensor):
        moved = x.to(device)
    elif isinstance(x, tuple):
        moved = tuple(_moved(part, device) for part in x)
    elif is_dataclass(x) and not isinstance(x, type):
        moved = type(x)(*(_moved(getattr(x, f.name), device) for f in fields(x)))
    return cast("T", moved)
