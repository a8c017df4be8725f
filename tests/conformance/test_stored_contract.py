"""Stored buffers, to the byte: each backend alike, and as they always were.

Each end of a boundary stores the buffers that it packs by itself. A byte that differs between two
machines, or two versions, loses a buffer.
"""

import hashlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec import pack_buffer, unpack_buffer
from swarm_ft.codec.kernels.base import scale_of
from swarm_ft.codec.kernels.cpu import NumbaKernels
from swarm_ft.codec.kernels.reference import ReferenceKernels

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def words(count: int, seed: int) -> NDArray[np.uint32]:
    """32-bit numbers that look random, the same on every machine."""
    index = np.arange(count, dtype=np.uint64) + np.uint64(seed << 20)
    mixed = (index * np.uint64(0x9E3779B97F4A7C15)) ^ (index << np.uint64(17))
    mixed ^= mixed >> np.uint64(29)
    return ((mixed * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(32)).astype(np.uint32)


def sums(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """About normal, with channels of many sizes and massive activations."""
    parts = words(4 * tokens * channels, seed).reshape(4, tokens, channels) >> 16
    x = (parts.astype(np.int64).sum(0) - 2 * 0xFFFF).astype(np.float32) / np.float32(1 << 15)
    x *= np.exp2((words(channels, seed + 1) % 9).astype(np.float32) - 4)
    x[0, seed % channels] = 1e5
    return torch.from_numpy(x)


def patterns(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """Any finite float32: every exponent, denormals, both zeros."""
    bits = words(tokens * channels, seed).reshape(tokens, channels)
    bits = np.where((bits >> 23 & 0xFF) == 0xFF, bits & 0x807FFFFF, bits)
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


CASES = {
    "sums": sums(128, 200),
    "small": sums(16, 33, seed=5) * 1e-9,
    "tiny": sums(16, 33, seed=6) * 2.0**-140,
    "huge": sums(16, 33, seed=7) * 2.0**109,
    "one token": sums(1, 70, seed=8),
    "one channel": sums(70, 1, seed=9),
    "patterns": patterns(64, 100),
    "wide patterns": patterns(3, 1000, seed=3),
    "zeros": torch.zeros(5, 40),
}
PINNED = {
    ("sums", 16): ("53f7159d2e861d16", "76c0c62d004bfe0a"),
    ("sums", 8): ("6bc61e24e5b06379", "feae4908283aa3ea"),
    ("sums", 4): ("2209394ce5b91899", "cb2a777aed85898f"),
    ("small", 16): ("10c44063216ed1a1", "e609906f6c5738ba"),
    ("small", 8): ("223322504031e6d9", "b6f2b3f8a23d9409"),
    ("small", 4): ("92f12df92860a5d4", "1e435f91d3cce978"),
    ("tiny", 16): ("7a31c30aa1f129bc", "ee177293e1bc80a4"),
    ("tiny", 8): ("039ca1cf6c78badf", "6ddf0b497390ed14"),
    ("tiny", 4): ("ea3ab551cace4b0e", "71c35f157d529e46"),
    ("huge", 16): ("66e1a8bd42361191", "229ca99da8f366dd"),
    ("huge", 8): ("6e6e3b18be87c67a", "944824880fc56d8d"),
    ("huge", 4): ("0b3816c2caa3137c", "6078066825aa702f"),
    ("one token", 16): ("88341cebde9911c6", "98968b7854b8d71b"),
    ("one token", 8): ("0c53db74732532c8", "d57125d1524a7874"),
    ("one token", 4): ("3bc31986db314452", "dc57829ff23c1bde"),
    ("one channel", 16): ("8a33f636226907ba", "0943444df1ab8f6b"),
    ("one channel", 8): ("93ce251be018edff", "90152aa47c72a331"),
    ("one channel", 4): ("7e354e8fc2d1d1fc", "a72aa341b30f5088"),
    ("patterns", 16): ("51cf1ac186ec037f", "6a1726adeacd9dd9"),
    ("patterns", 8): ("518084cd42ca0a9c", "68344d6a626ccafc"),
    ("patterns", 4): ("e919f4c78b5ee81c", "c9a4201c60b3b0cf"),
    ("wide patterns", 16): ("adf4d48a86226701", "fc9319be972cb245"),
    ("wide patterns", 8): ("2dce959b9587367b", "24817f1d1eee1caf"),
    ("wide patterns", 4): ("81c7f52b743253a2", "2eefe11bdbdef125"),
    ("zeros", 16): ("bb8e3d3a2750431b", "1e500f3f6d666af2"),
    ("zeros", 8): ("560a606b3b22012d", "1e500f3f6d666af2"),
    ("zeros", 4): ("34fcd406e0b9b85e", "1e500f3f6d666af2"),
}
"""Digests of what is packed, and of what is made of that again."""


def unpack_like(x: Tensor, payload: bytes, bits: int) -> Tensor:
    tokens, channels = x.shape
    return unpack_buffer(payload, tokens, channels, bits)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", CASES)
def test_bytes_and_values_are_those_of_the_table(name: str, bits: int) -> None:
    x = CASES[name]
    payload = pack_buffer(x, bits)
    y = unpack_like(x, payload, bits)
    assert (digest(payload), digest(y.numpy().tobytes())) == PINNED[name, bits]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", CASES)
def test_plain_torch_on_any_device_writes_those_bytes(
    name: str, bits: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = CASES[name]
    monkeypatch.setattr("swarm_ft.codec.stored.kernels_for", lambda _: ReferenceKernels())
    payload = pack_buffer(x.to(device), bits)
    assert digest(payload) == PINNED[name, bits][0]
    assert digest(unpack_like(x, payload, bits).numpy().tobytes()) == PINNED[name, bits][1]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("tiny", "huge")])
def test_backends_agree_in_every_part(name: str, bits: int) -> None:
    x = CASES[name].clamp(-(2.0**39), 2.0**39)
    loops, plain = NumbaKernels(), ReferenceKernels()
    for one, other in zip(loops.magnitudes(x), plain.magnitudes(x), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    channels = torch.from_numpy(words(x.shape[1], 11).astype(np.int64) % 900 + 400)
    blocks, codes = loops.quantize_blocks(x, channels, bits)
    for one, other in zip((blocks, codes), plain.quantize_blocks(x, channels, bits), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    values = (
        kernels.dequantize_blocks(codes, blocks, channels, bits) for kernels in (loops, plain)
    )
    assert torch.equal(*values)


def test_a_block_of_an_infinity_or_nan_is_seen_by_its_peak() -> None:
    for value in (float("inf"), float("nan"), -float("inf")):
        x = torch.ones(2, 40)
        x[1, 39] = value
        for kernels in (NumbaKernels(), ReferenceKernels()):
            assert not kernels.magnitudes(x)[2].isfinite().any()


def test_scales_are_patterns_of_three_bits_of_mantissa() -> None:
    assert scale_of(torch.tensor([0, 127 << 3, (127 << 3) + 1, 128 << 3])).tolist() == [
        0.0,
        1.0,
        1.125,
        2.0,
    ]


def test_sizes_that_do_not_fit_are_refused() -> None:
    codes, blocks = torch.zeros(2, 40, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int32)
    channels = torch.full((40,), 127 << 3)
    with pytest.raises(ValueError, match=r"channels: expected \[40\], got \[39\]"):
        NumbaKernels().quantize_blocks(torch.ones(2, 40), channels[1:], 4)
    with pytest.raises(ValueError, match="blocks"):
        NumbaKernels().dequantize_blocks(codes, blocks, channels, 4)
