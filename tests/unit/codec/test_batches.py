"""Codecs as a library: batches, buffers by sample, autograd, and other pipelines."""

import pytest
import torch
from hivemind.compression import CompressionInfo, deserialize_torch_tensor, serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.batches import BatchDecoder, BatchEncoder, BufferCache, CompressedBoundary
from swarm_ft.codec.for_hivemind import CodecCompression, register_compression
from swarm_ft.codec.for_pipelining import ReceiveEnd, SendEnd
from swarm_ft.codec.spec import Direction
from swarm_ft.errors import BadCodec, BadFrame, NonFinite, SwarmError
from tests.draws import draws

SHAPE = (3, 8, 16)


def batch(
    seed: int = 0, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error_of(found: Tensor, exact: Tensor) -> float:
    exact = exact.detach().float()
    return float((found.detach().float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_changes_are_sent_of_samples_that_were_there_before(dtype: torch.dtype) -> None:
    encoder, decoder = BatchEncoder("aq4"), BatchDecoder("aq4")
    x, ids = batch(dtype=dtype), [7, 3, 5]
    errors = []
    for _ in range(3):
        y = decoder.decode(encoder.encode(x, ids), ids, dtype=dtype)
        errors.append(error_of(y, x))
    assert y.dtype == dtype
    assert y.shape == SHAPE
    assert errors[2] < errors[1] < errors[0] < 0.2
    # In another order, with one that is new.
    mixed = [5, 9, 7]
    moved = x[[2, 0, 0]]
    assert error_of(decoder.decode(encoder.encode(moved, mixed), mixed)[[0, 2]], x[[2, 0]]) < 0.02


def test_ends_that_differ_notice_and_forget() -> None:
    encoder, decoder = BatchEncoder("aq4"), BatchDecoder("aq4")
    x = batch()
    decoder.decode(encoder.encode(x, [0, 1, 2]), [0, 1, 2])
    encoder.encode(x, [0, 1, 2])  # lost on its way
    with pytest.raises(BadFrame, match="sample 0: this end has another buffer of it"):
        decoder.decode(encoder.encode(x, [0, 1, 2]), [0, 1, 2])
    for end in (encoder, decoder):
        end.forget([0, 1, 2])
    assert error_of(decoder.decode(encoder.encode(x, [0, 1, 2]), [0, 1, 2]), x) < 0.2
    with pytest.raises(BadFrame, match="this end has no buffer of it"):
        BatchDecoder("aq4").decode(encoder.encode(x, [0, 1, 2]), [0, 1, 2])


@pytest.mark.parametrize("codec", ["none", "q4+z", "top10+ef", "q4t+ef21"])
def test_gradients_go_by_every_kind_of_codec(codec: str) -> None:
    encoder = BatchEncoder(codec, direction=Direction.BACKWARD)
    decoder = BatchDecoder(codec, direction=Direction.BACKWARD)
    x, total = batch(), torch.zeros(SHAPE)
    for _ in range(30):
        total += decoder.decode(encoder.encode(x, [0, 1, 2]), [0, 1, 2])
    assert error_of(total / 30, x) < (0.35 if "top" in codec else 0.1)


def test_buffers_have_a_bound_and_the_oldest_goes_first() -> None:
    kept = BufferCache(bits=8, max_bytes=1 << 20)
    one = batch()[0]
    kept.put(0, one)
    size = kept.num_bytes
    small = BufferCache(bits=8, max_bytes=2 * size)
    for sample in (0, 1, 0, 2):
        small.put(sample, one)
    assert (len(small), 1 in small, small.num_bytes) == (2, False, 2 * size)
    assert small.get(0, 4, 32) is None  # another shape
    small.forget([0, 2, 8])
    assert (len(small), small.num_bytes) == (0, 0)


@given(st.binary(max_size=200))
@settings(max_examples=draws(200))
def test_whatever_comes_is_a_batch_or_refused(frame: bytes) -> None:
    decoder = BatchDecoder("aq4")
    try:
        assert decoder.decode([frame], [0]).isfinite().all()
    except SwarmError:
        assert 0 not in decoder.buffers


def test_what_is_no_batch_is_refused() -> None:
    encoder = BatchEncoder("aq4")
    for x in (batch()[0], batch().double(), batch()[:0]):
        with pytest.raises(BadFrame, match="x: expected float32, bfloat16 or float16"):
            encoder.encode(x, [0, 1, 2])
    with pytest.raises(BadFrame, match="sample_ids: expected 3 different ones"):
        encoder.encode(batch(), [0, 1, 1])
    with pytest.raises(NonFinite):
        encoder.encode(batch() / 0, [0, 1, 2])
    with pytest.raises(BadFrame, match="expected as many"):
        BatchDecoder("aq4").decode([], [0])
    frames = BatchEncoder("q4").encode(batch(), [0, 1, 2])
    with pytest.raises(BadFrame, match="aq4tc has no kind 0"):
        BatchDecoder("aq4").decode(frames, [0, 1, 2])
    with pytest.raises(BadCodec):
        BatchEncoder("zebra")


def test_a_boundary_passes_what_would_arrive_and_its_gradient() -> None:
    exact, coarse = CompressedBoundary("none", "none"), CompressedBoundary("aq4", "q8")
    x, weights = batch().requires_grad_(), batch(1)
    (found,) = torch.autograd.grad((exact(x, [0, 1, 2]) * weights).sum(), x)
    assert torch.equal(found, weights)
    for _ in range(2):
        y = coarse(x, [0, 1, 2])
    (found,) = torch.autograd.grad((y * weights).sum(), x)
    assert 0 < error_of(y, x) < 0.05
    assert 0 < error_of(found, weights) < 0.01
    assert coarse.uncompressed_bytes == 3 * 4 * x.numel()
    assert coarse.sent_bytes < coarse.uncompressed_bytes
    coarse.forget([0, 1, 2])
    assert error_of(coarse(x, [0, 1, 2]), x) > error_of(y, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ends_of_torchs_pipelines_pass_frames_as_tensors(dtype: torch.dtype) -> None:
    send, receive = SendEnd(8, 16), ReceiveEnd(8, 16)
    x = batch(dtype=dtype).requires_grad_()
    ids = torch.tensor([4, 5, 6])
    for _ in range(2):
        words = send(x, ids)
        arrived = words.detach().clone().requires_grad_()  # over a link
        y = receive(arrived, ids, dtype)
        (back,) = torch.autograd.grad(y, arrived, batch(1, dtype=dtype))
        (gradient,) = torch.autograd.grad(words, x, back)
    assert words.shape == back.shape == send.example(3).shape
    assert words.dtype is torch.float32
    assert (y.dtype, gradient.dtype) == (dtype, dtype)
    assert error_of(y, x) < 0.05
    assert error_of(gradient, batch(1)) < 0.2
    with pytest.raises(BadFrame, match=r"expected \[samples, 8, 16\]"):
        send(batch(shape=(3, 4, 16)), ids)


@pytest.mark.parametrize("shape", [(64, 40), (5,), (3, 1024), (), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hivemind_compresses_by_our_codec(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        serialization,
        "_BASE_COMPRESSION_TYPES",
        {**serialization._BASE_COMPRESSION_TYPES},  # noqa: SLF001
    )
    compression = CodecCompression("q8")
    register_compression(compression)
    tensor = batch(shape=shape, dtype=dtype).requires_grad_()
    info = CompressionInfo.from_tensor(tensor)
    message = compression.compress(tensor, info)
    found = deserialize_torch_tensor(message)
    assert (found.shape, found.dtype, found.requires_grad) == (tensor.shape, dtype, True)
    if tensor.numel():
        assert error_of(found, tensor) < 0.02
        assert len(message.buffer) <= 64 + tensor.nbytes * compression.estimate_compression_ratio(
            info
        )


def test_hivemind_gets_no_codec_that_remembers_and_no_other_tensors() -> None:
    with pytest.raises(BadCodec, match="without state between messages"):
        CodecCompression("top10+ef")
    compression = CodecCompression("q8")
    message = compression.compress(batch(), CompressionInfo.from_tensor(batch()))
    message.size[0] = 300
    with pytest.raises(BadFrame, match="expected 38400 values"):
        compression.extract(message)
    message.dtype = "int64"
    with pytest.raises(BadFrame, match="type of floats"):
        compression.extract(message)
