"""The change against a base, by any codec that builds on nothing: `aqtopK`, `q4t+ef21`, ...

Knows a base as a tensor; where it is kept, and whether the other end has it, is others' work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from swarm_ft.codec.base import (
    Codec,
    check_encoded,
    check_finite,
    checked_sample,
    needed_base,
)
from swarm_ft.protocol.codec_spec import CodecSpec
from swarm_ft.protocol.frame import EncodedTensor


@dataclass(frozen=True, slots=True)
class DeltaCodec:
    """m + C(a - m) for a value a, a base m and a codec C.

    AQ-SGD for activations (arXiv 2206.01299, algorithm 1); for gradients the same sum is EF21
    (arXiv 2106.05203). The error is C's relative to the change alone, so it shrinks from visit
    to visit as training settles.

    Attributes:
        spec: what frames carry.
        inner: C. Its spec is its own: without the delta or the feedback that `spec` names.
    """

    spec: CodecSpec
    inner: Codec

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """See `Codec.encode`; base may be on another device than x."""
        x = checked_sample(x)
        base = needed_base(self.spec, base, *x.shape)
        return replace(self.inner.encode(x - base.to(x.device)), codec=self.spec)

    def decode(self, encoded: EncodedTensor, base: Tensor | None = None) -> Tensor:
        """See `Codec.decode`; base + delta, with the one rounding of the sum."""
        check_encoded(self, encoded)
        base = needed_base(self.spec, base, encoded.tokens, encoded.channels)
        delta = self.inner.decode(replace(encoded, codec=self.inner.spec))
        return check_finite(base + delta.to(base.device))

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`; the delta's."""
        return self.inner.max_payload_bytes(tokens, channels)
