"""The arithmetic of one step's all-reduce at one member. Synchronous; runs in the codec threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec.base import peak_of
from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.errors import BadFrame, NonFinite, OutOfTurn
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


@dataclass(frozen=True, slots=True)
class EncodedSum:
    """The sum of all members' gradients as they encoded it.

    Attributes:
        pieces: how many values each holds, and the piece; they are known to decode.
    """

    pieces: tuple[tuple[int, EncodedTensor], ...]

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return sum(len(tensor.payload) for _, tensor in self.pieces)

    def decoded(self, codec: PieceCodec) -> Tensor:
        """What all other members took, bit for bit, float32 [n]."""
        return torch.cat([codec.decode(tensor, count) for count, tensor in self.pieces])


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

    def _sum(self, span: Span, shares: Mapping[int, EncodedTensor]) -> EncodedTensor | BadPiece:
        where = span.start, span.stop
        total = torch.zeros(span.num_values)
        for member, share in shares.items():
            try:
                total += _decoded(self._codec, span, share, _MAX_SHARE)
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
            self.result[span.start : span.stop] = _decoded(self._codec, span, tensor, _MAX_SUM)
        except BadFrame as error:
            return BadPiece(span.owner, error)
        return None


class SumKeeper:
    """One step's sum at a member that listens: checked piece by piece, and kept as it came."""

    def __init__(self, codec: PieceCodec) -> None:
        self._codec = codec
        self._kept: dict[int, tuple[int, EncodedTensor]] = {}

    @property
    def result(self) -> EncodedSum:
        """The sum, whole once every piece was taken in."""
        return EncodedSum(tuple(self._kept[index] for index in sorted(self._kept)))

    def work(self, task: PieceTask) -> BadPiece | None:
        """Take in a sum; whoever listens is asked for nothing else.

        Raises:
            OutOfTurn: it is.
        """
        if not isinstance(task, TakeSum):
            raise OutOfTurn(f"a member that listens was asked for {task}")
        span, tensor = task.span, task.tensor
        try:
            _decoded(self._codec, span, tensor, _MAX_SUM)
        except BadFrame as error:
            return BadPiece(span.owner, error)
        self._kept[span.index] = span.num_values, tensor
        return None


def _decoded(codec: PieceCodec, span: Span, tensor: EncodedTensor, limit: float) -> Tensor:
    values = codec.decode(tensor, span.num_values)
    peak = peak_of(values)
    if peak > limit:
        raise BadFrame(f"piece {span.index}: expected gradients up to {limit:g}, got {peak:g}")
    return values
