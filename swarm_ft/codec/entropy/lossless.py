"""`+z` on codecs whose payload is bytes already: the same bytes, in fewer.

Bytes are coded in as many contexts as there are bytes to an element, so that exponents, which
repeat, are apart from mantissas, which do not. Layout: a zero byte and the payload as it is,
where coding does not help; else the number of contexts, the payload's size, and the stream.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm_ft.codec.base import Codec, as_tensor, check_encoded
from swarm_ft.codec.entropy.stream import read_symbols, write_symbols
from swarm_ft.codec.kernels import Kernels, kernels_for
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.codec_spec import CodecName, CodecSpec
from swarm_ft.protocol.frame import EncodedTensor

_HEADER = struct.Struct("<BI")
_ELEMENT_BYTES = {CodecName.NONE: 4, CodecName.LOWRANK: 1}


@dataclass(frozen=True, slots=True)
class LosslessCodec:
    """What `inner` writes, entropy-coded.

    Attributes:
        spec: inner's, with the entropy stage.
        inner: the codec that makes the payload; it is called with its own spec.
    """

    spec: CodecSpec
    inner: Codec
    kernels: Kernels | None = None

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """See `Codec.encode`."""
        return self.compress(self.inner.encode(x, base))

    def compress(self, encoded: EncodedTensor) -> EncodedTensor:
        """What `inner` encoded, with this codec's payload."""
        payload = self._compressed(encoded.payload)
        return EncodedTensor(self.spec, encoded.tokens, encoded.channels, payload)

    def decode(self, encoded: EncodedTensor, base: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        check_encoded(self, encoded)
        tokens, channels = encoded.tokens, encoded.channels
        limit = self.inner.max_payload_bytes(tokens, channels)
        payload = self._decompressed(encoded.payload, limit)
        return self.inner.decode(EncodedTensor(self.inner.spec, tokens, channels, payload), base)

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`."""
        return 1 + self.inner.max_payload_bytes(tokens, channels)

    def _compressed(self, payload: bytes) -> bytes:
        symbols = as_tensor(payload)
        stride = _ELEMENT_BYTES.get(self.spec.name, 2)
        contexts = (torch.arange(len(symbols)) % stride).to(torch.uint8)
        kernels = self._kernels()
        counts = kernels.histogram(symbols, contexts, stride).numpy()
        stream = write_symbols(symbols, contexts, counts, kernels)
        if _HEADER.size + len(stream) >= len(payload):
            return b"\0" + payload
        return _HEADER.pack(stride, len(payload)) + stream

    def _decompressed(self, data: bytes, limit: int) -> bytes:
        if data[:1] == b"\0":
            return data[1:]
        if len(data) < _HEADER.size:
            raise BadFrame(f"frame: expected a header of {_HEADER.size} bytes, got {len(data)}")
        stride, size = _HEADER.unpack_from(data)
        if not 1 <= stride <= 4 or not 1 <= size <= limit:
            raise BadFrame(f"frame: expected 1 to {limit} bytes of payload, got {size}")
        contexts = (torch.arange(size) % stride).to(torch.uint8)
        symbols = read_symbols(data[_HEADER.size :], contexts, self._kernels())
        return np.ascontiguousarray(symbols.numpy()).tobytes()

    def _kernels(self) -> Kernels:
        return self.kernels or kernels_for("cpu")  # payloads are bytes, and bytes are on the host
