"""Replicas of a whole model in one process: each step's gradient is the sum of their shares.

Does what peers do, with the project's own division, codecs and residuals, but for streams. The
replicas hold the same weights bit for bit, so here they are kept once. Knows no text, no cuts.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.quality.boundary import Tally
from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.codec.spec import parse_dp_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.ids import StepNumber
from swarm_ft.peer.reduce.gradient_coder import GradientCoder, Residuals
from swarm_ft.protocol.messages.reduction import (
    Division,
    EncodeShare,
    PieceSpan,
    SumShares,
    TakeSum,
)

NUM_REPLICAS = 2


class Replicas:
    """All replicas of a model with their residuals, and what they sent.

    Attributes:
        tally: all pieces that went from one replica to another.
    """

    def __init__(self, dp: str, count: int = NUM_REPLICAS) -> None:
        """`dp` as in `--dp`."""
        self.count = count
        self.tally = Tally()
        self._codec = PieceCodec(parse_dp_spec(dp))
        self._residuals = [Residuals() for _ in range(count)]
        self._step = 0

    def reduce(self, gradients: list[Tensor]) -> Tensor:
        """Sum the replicas' gradients as they do it, and commit the step.

        Args:
            gradients: of each replica, float32 [n]; they add up to the step's.

        Raises:
            NonFinite: a gradient is infinite or NaN.
        """
        total = self._sum(gradients)
        for residuals in self._residuals:
            residuals.commit()
        self._step += 1
        return total

    def _sum(self, shares: list[Tensor]) -> Tensor:
        division = Division(len(shares[0]), self.count)
        coders = [self._coder(i, share, division) for i, share in enumerate(shares)]
        for span in division.spans:
            self._sum_piece(span, coders)
        return coders[0].result

    def _coder(self, member: int, share: Tensor, division: Division) -> GradientCoder:
        residuals = None
        if not self._codec.is_exact:
            residuals = self._residuals[member].begin(len(share), division.shard(member))
        return GradientCoder(self._codec, StepNumber(self._step), share, residuals)

    def _sum_piece(self, span: PieceSpan, coders: list[GradientCoder]) -> None:
        shares = {i: _tensor(coder.work(EncodeShare(span))) for i, coder in enumerate(coders)}
        total = _tensor(coders[span.owner].work(SumShares(span, shares)))
        for member, coder in enumerate(coders):
            if member != span.owner:
                self.tally.add(shares[member])
                self.tally.add(total)
                coder.work(TakeSum(span, total))


def _tensor(made: object) -> EncodedTensor:
    if not isinstance(made, EncodedTensor):  # a piece that was tampered with, and here none was
        raise TypeError(f"expected an encoded piece, got {made}")
    return made
