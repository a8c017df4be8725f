"""Arithmetic of one step's all-reduce at one member. Synchronous; runs in the codec threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec.base import peak_of
from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame, MalformedMessage, NonFinite, OutOfTurn
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.reduction import (
    EncodeShare,
    PieceSpan,
    PieceTask,
    SumShares,
    TakeSum,
)

# ---- residuals of the replicas' gradient codec at this peer, from step to step
#
# A stage has two residuals, float32. The worker's is of the whole gradient, which this peer sends
# in shares; the server's is of the shard that it sums. A step without a commit leaves both
# unchanged, so that it can be redone.


@dataclass(frozen=True, slots=True)
class _ResidualRange:
    """Residuals of the values start..start+n-1 of a gradient."""

    start: int
    values: Tensor

    def part(self, start: int, stop: int) -> Tensor:
        """Return a view of a range, which lies inside."""
        return self.values[start - self.start : stop - self.start]

    def for_range(self, start: int, stop: int) -> _ResidualRange:
        """Return the residuals of another range: copies where they overlap, zeros elsewhere."""
        if (start, stop) == (self.start, self.start + len(self.values)):
            return self
        other = _ResidualRange(start, torch.zeros(stop - start))
        low, high = max(start, self.start), min(stop, self.start + len(self.values))
        if low < high:
            other.part(low, high).copy_(self.part(low, high))
        return other


_NOTHING = _ResidualRange(0, torch.zeros(0))


class StepResiduals:
    """Residuals before and after one step. Threads may write to different parts."""

    def __init__(self, worker: Tensor | None, server: _ResidualRange, num_values: int) -> None:
        self._worker = worker
        self._server = server
        self.new_worker = torch.empty(num_values)
        self.new_server = _ResidualRange(server.start, torch.empty_like(server.values))

    def worker(self, start: int, stop: int) -> Tensor | None:
        """Return the residual of a range of the own gradient, float32 [n]; None for zeros."""
        return None if self._worker is None else self._worker[start:stop]

    def server(self, start: int, stop: int) -> Tensor:
        """Return the residual of a range of the sum, inside of the own shard, float32 [n]."""
        return self._server.part(start, stop)

    def set_worker(self, start: int, stop: int, residual: Tensor) -> None:
        """Set the next residual of a range of the own gradient."""
        self.new_worker[start:stop] = residual

    def set_server(self, start: int, stop: int, residual: Tensor) -> None:
        """Set the next residual of a range of the sum."""
        self.new_server.part(start, stop).copy_(residual)


class Residuals:
    """Residuals of one stage at this peer as of the last committed step. They outlive attempts."""

    def __init__(self) -> None:
        self._worker: Tensor | None = None
        self._server = _NOTHING
        self._open: StepResiduals | None = None

    def begin(self, num_values: int, shard: tuple[int, int]) -> StepResiduals:
        """Start a step, or restart it, in which this peer sums the values of `shard`.

        The shard changes when a member joins or leaves; residuals of values in both shards remain.
        Writes of an earlier attempt have no effect.
        """
        worker = self._worker
        if worker is not None and len(worker) != num_values:
            worker = None
        self._open = StepResiduals(worker, self._server.for_range(*shard), num_values)
        return self._open

    def commit(self) -> None:
        """Make the open step's residuals the committed ones.

        Without an open step nothing changes.
        """
        if self._open is not None:
            self._worker, self._server = self._open.new_worker, self._open.new_server
            self._open = None

    def rollback(self) -> None:
        """Drop the open step's residuals, to redo the step."""
        self._open = None

    def export(self) -> dict[str, Tensor]:
        """Return the committed residuals, not to be modified, for `restore`.

        Empty if there are none.
        """
        if self._worker is None:
            return {}
        start = torch.tensor([self._server.start])
        return {"worker": self._worker, "server": self._server.values, "server_start": start}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace the residuals by an export, and drop an open step.

        Raises:
            MalformedMessage: The tensors are no export.
        """
        if tensors:
            self._worker, self._server = _checked(tensors)
        else:
            self._worker, self._server = None, _NOTHING
        self._open = None


def _checked(tensors: dict[str, Tensor]) -> tuple[Tensor, _ResidualRange]:
    if tensors.keys() != {"worker", "server", "server_start"}:
        raise MalformedMessage(
            f"residuals: expected worker, server and server_start, got {sorted(tensors)}"
        )
    for name in ("worker", "server"):
        x = tensors[name]
        if x.dtype != torch.float32 or x.dim() != 1 or not bool(torch.isfinite(x).all()):
            raise MalformedMessage(
                f"residuals: expected {name} to be finite float32 [n], "
                f"got {x.dtype} {list(x.shape)}"
            )
    start, worker, server = tensors["server_start"], tensors["worker"], tensors["server"]
    if start.dtype != torch.int64 or start.numel() != 1:
        raise MalformedMessage("residuals: expected server_start to be one int64")
    if not 0 <= int(start) <= len(worker) - len(server):
        raise MalformedMessage(
            f"residuals: expected a shard of {len(worker)} values, "
            f"got {len(server)} from {int(start)} on"
        )
    return worker, _ResidualRange(int(start), server)


MAX_GRADIENT = 1e30
"""Largest gradient; a larger one means that the model diverged. Below it, all sums are finite."""
_MAX_SHARE, _MAX_SUM = 1e32, 1e36
"""Limits of decoded values, which error feedback and hundreds of members can reach."""


@dataclass(frozen=True, slots=True)
class BadPiece:
    """An unusable piece of a member."""

    member: int
    error: BadFrame


@dataclass(frozen=True, slots=True)
class EncodedSum:
    """The sum of all members' gradients in encoded form.

    Attributes:
        pieces: Number of values and encoded tensor of each piece; all of them decode.
    """

    pieces: tuple[tuple[int, EncodedTensor], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(len(tensor.payload) for _, tensor in self.pieces)

    def decoded(self, codec: PieceCodec) -> Tensor:
        """Decode the sum, with the bits that all other members have, float32 [n]."""
        return torch.cat([codec.decode(tensor, count) for count, tensor in self.pieces])


class GradientCoder:
    """Coder of a step's gradient, and of the sum of all members, which arrives piece by piece.

    Attributes:
        result: Sum, float32 [n]; complete once every piece was summed or received.
    """

    def __init__(
        self,
        codec: PieceCodec,
        step: StepNumber,
        gradient: Tensor,
        residuals: StepResiduals | None,
    ) -> None:
        """Start a step.

        Args:
            codec: Codec of the run.
            step: Number of the step, for messages.
            gradient: Gradient of this member, float32 [n] on the CPU; read until the step is done.
            residuals: Residuals of the step; None if the codec is exact.
        """
        self._codec = codec
        self._step = step
        self._gradient = gradient
        self._residuals = residuals
        self.result = torch.empty_like(gradient)

    def work(self, task: PieceTask) -> EncodedTensor | BadPiece | None:
        """Encode a share or a sum and return it, or take in a sum.

        Raises:
            NonFinite: This member's gradient has inf, NaN or values above the limit.
        """
        match task:
            case EncodeShare(span):
                return self._share(span)
            case SumShares(span, shares):
                return self._sum(span, shares)
            case TakeSum(span, tensor):
                return self._take(span, tensor)

    def _share(self, span: PieceSpan) -> EncodedTensor:
        where = span.start, span.stop
        values = self._gradient[slice(*where)]
        if not peak_of(values) <= MAX_GRADIENT:  # NaN fails every comparison
            raise NonFinite(
                f"step {self._step}: a gradient is larger than {MAX_GRADIENT:g}, inf or NaN"
            )
        residual = None if self._residuals is None else self._residuals.worker(*where)
        piece = self._codec.encode(values, residual)
        if self._residuals is not None and piece.residual is not None:
            self._residuals.set_worker(*where, piece.residual)
        return piece.tensor

    def _sum(
        self, span: PieceSpan, shares: Mapping[int, EncodedTensor]
    ) -> EncodedTensor | BadPiece:
        where = span.start, span.stop
        total = torch.zeros(span.num_values)
        for member, share in shares.items():
            try:
                total += _decoded(self._codec, span, share, _MAX_SHARE)
            except BadFrame as error:
                return BadPiece(member, error)
        residual = None if self._residuals is None else self._residuals.server(*where)
        piece = self._codec.encode(total, residual)
        if self._residuals is not None and piece.residual is not None:
            self._residuals.set_server(*where, piece.residual)
        self.result[slice(*where)] = piece.values
        return piece.tensor

    def _take(self, span: PieceSpan, tensor: EncodedTensor) -> BadPiece | None:
        try:
            self.result[span.start : span.stop] = _decoded(self._codec, span, tensor, _MAX_SUM)
        except BadFrame as error:
            return BadPiece(span.owner, error)
        return None


class SumCollector:
    """The sum of a step at a listener: checked piece by piece and stored in encoded form."""

    def __init__(self, codec: PieceCodec) -> None:
        self._codec = codec
        self._pieces: dict[int, tuple[int, EncodedTensor]] = {}

    @property
    def result(self) -> EncodedSum:
        """The sum; complete once every piece was taken in."""
        return EncodedSum(tuple(self._pieces[index] for index in sorted(self._pieces)))

    def work(self, task: PieceTask) -> BadPiece | None:
        """Take in a sum; a listener gets no other task.

        Raises:
            OutOfTurn: The task is another one.
        """
        if not isinstance(task, TakeSum):
            raise OutOfTurn(f"expected a sum as the task of a listener, got {task}")
        span, tensor = task.span, task.tensor
        try:
            _decoded(self._codec, span, tensor, _MAX_SUM)
        except BadFrame as error:
            return BadPiece(span.owner, error)
        self._pieces[span.index] = span.num_values, tensor
        return None


def _decoded(codec: PieceCodec, span: PieceSpan, tensor: EncodedTensor, limit: float) -> Tensor:
    values = codec.decode(tensor, span.num_values)
    peak = peak_of(values)
    if peak > limit:
        raise BadFrame(f"piece {span.index}: expected gradients up to {limit:g}, got {peak:g}")
    return values
