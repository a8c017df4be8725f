"""The arithmetic of one step's all-reduce at one member. Synchronous; runs in the codec threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec.base import peak_of
from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.errors import BadFrame, NonFinite
from swarm_ft.ids import StepNumber
from swarm_ft.peer.residuals import StepResiduals
from swarm_ft.protocol.frame import EncodedTensor
from swarm_ft.protocol.gradient_piece import EncodeShare, PieceTask, Span, SumShares, TakeSum

MAX_GRADIENT = 1e30
"""A larger one is a model that diverged; below it, sums over all members are finite."""
_MAX_SHARE, _MAX_SUM = 1e32, 1e36
"""What error feedback and hundreds of members can make of gradients below that."""


@dataclass(frozen=True, slots=True)
class BadPiece:
    """What a member sent cannot be used."""

    member: int
    error: BadFrame


class GradientCoder:
    """One step's own gradient, and the sum of all members' as it comes in piece by piece.

    Attributes:
        result: float32 [n]; whole once every piece was summed here or taken in.
    """

    def __init__(
        self,
        codec: PieceCodec,
        step: StepNumber,
        gradient: Tensor,
        residuals: StepResiduals | None,
    ) -> None:
        """Begin a step.

        Args:
            codec: of the run.
            step: its number, for messages.
            gradient: float32 [n] on the CPU, this member's; read until the step is done.
            residuals: of this step; None if the codec loses nothing.
        """
        self._codec = codec
        self._step = step
        self._gradient = gradient
        self._residuals = residuals
        self.result = torch.empty_like(gradient)

    def work(self, task: PieceTask) -> EncodedTensor | BadPiece | None:
        """Do what the protocol asks for: a share or a sum to send, or nothing for a sum taken in.

        Raises:
            NonFinite: this member's gradient is infinite, NaN or as good as that.
        """
        match task:
            case EncodeShare(span):
                return self._share(span)
            case SumShares(span, shares):
                return self._sum(span, shares)
            case TakeSum(span, tensor):
                return self._take(span, tensor)

    def _share(self, span: Span) -> EncodedTensor:
        where = span.start, span.stop
        values = self._gradient[slice(*where)]
        if not peak_of(values) <= MAX_GRADIENT:  # NaN is no number to compare with
            raise NonFinite(
                f"step {self._step}: a gradient is larger than {MAX_GRADIENT:g}, inf or NaN; "
                f"a smaller --lr may help"
            )
        if self._residuals is None:
            return self._codec.encode(values).tensor
        piece = self._codec.encode(values, self._residuals.worker(*where))
        if piece.residual is not None:
            self._residuals.set_worker(*where, piece.residual)
        return piece.tensor

    def _sum(self, span: Span, shares: tuple[EncodedTensor, ...]) -> EncodedTensor | BadPiece:
        where = span.start, span.stop
        total = torch.zeros(span.num_values)
        for member, share in enumerate(shares):
            try:
                total += self._decoded(span, share, _MAX_SHARE)
            except BadFrame as error:
                return BadPiece(member, error)
        owed = None if self._residuals is None else self._residuals.server(*where)
        piece = self._codec.encode(total, owed)
        if self._residuals is not None and piece.residual is not None:
            self._residuals.set_server(*where, piece.residual)
        self.result[slice(*where)] = piece.values
        return piece.tensor

    def _take(self, span: Span, tensor: EncodedTensor) -> BadPiece | None:
        try:
            self.result[span.start : span.stop] = self._decoded(span, tensor, _MAX_SUM)
        except BadFrame as error:
            return BadPiece(span.owner, error)
        return None

    def _decoded(self, span: Span, tensor: EncodedTensor, limit: float) -> Tensor:
        values = self._codec.decode(tensor, span.num_values)
        peak = peak_of(values)
        if peak > limit:
            raise BadFrame(f"piece {span.index}: expected gradients up to {limit:g}, got {peak:g}")
        return values
