"""What the codec of the replicas' gradients still owes at this peer, from step to step.

Two residuals of a stage, float32: the worker's, of the whole gradient that this peer sends out in
shares, and the server's, of the shard that it sums. A step that is not committed leaves them as
they were, so it can be redone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.errors import MalformedMessage


@dataclass(frozen=True, slots=True)
class _Owed:
    """Residuals of the values start..start+n-1 of a gradient."""

    start: int
    values: Tensor

    def part(self, start: int, stop: int) -> Tensor:
        """A view of some of them, which lie inside."""
        return self.values[start - self.start : stop - self.start]

    def moved(self, start: int, stop: int) -> _Owed:
        """Those of another range: these where the ranges overlap, zeros elsewhere."""
        if (start, stop) == (self.start, self.start + len(self.values)):
            return self
        other = _Owed(start, torch.zeros(stop - start))
        low, high = max(start, self.start), min(stop, self.start + len(self.values))
        if low < high:
            other.part(low, high).copy_(self.part(low, high))
        return other


_NOTHING = _Owed(0, torch.zeros(0))


class StepResiduals:
    """Residuals before and after one step. Threads may write to different parts of it."""

    def __init__(self, worker: Tensor | None, server: _Owed, num_values: int) -> None:
        self._worker = worker
        self._server = server
        self.new_worker = torch.empty(num_values)
        self.new_server = _Owed(server.start, torch.empty_like(server.values))

    def worker(self, start: int, stop: int) -> Tensor | None:
        """What is owed of these values of the own gradient, float32 [n]; None for zeros."""
        return None if self._worker is None else self._worker[start:stop]

    def server(self, start: int, stop: int) -> Tensor:
        """What is owed of these values of the sum, which lie in the own shard, float32 [n]."""
        return self._server.part(start, stop)

    def set_worker(self, start: int, stop: int, residual: Tensor) -> None:
        """What will be owed of the own gradient once the step is committed."""
        self.new_worker[start:stop] = residual

    def set_server(self, start: int, stop: int, residual: Tensor) -> None:
        """What will be owed of the sum once the step is committed."""
        self.new_server.part(start, stop).copy_(residual)


class Residuals:
    """Residuals of one stage at this peer as of the last committed step; outlives attempts."""

    def __init__(self) -> None:
        self._worker: Tensor | None = None
        self._server = _NOTHING
        self._open: StepResiduals | None = None

    def begin(self, num_values: int, shard: tuple[int, int]) -> StepResiduals:
        """Start a step, or start it again, in which this peer sums the values of `shard`.

        The shard is another one where a member came or went: what is owed is then kept of the
        values that are in both. What an earlier attempt still writes goes nowhere.
        """
        worker = self._worker
        if worker is not None and len(worker) != num_values:
            worker = None
        self._open = StepResiduals(worker, self._server.moved(*shard), num_values)
        return self._open

    def commit(self) -> None:
        """The step counts: its residuals are what is owed now. Without a step, nothing changes."""
        if self._open is not None:
            self._worker, self._server = self._open.new_worker, self._open.new_server
            self._open = None

    def rollback(self) -> None:
        """The step is to be redone: what it left is dropped."""
        self._open = None

    def export(self) -> dict[str, Tensor]:
        """The committed residuals, for `restore`; not to be written to. Empty if there are none."""
        if self._worker is None:
            return {}
        start = torch.tensor([self._server.start])
        return {"worker": self._worker, "server": self._server.values, "server_start": start}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take what `export` gave; an open step is dropped.

        Raises:
            MalformedMessage: other tensors than it gives.
        """
        if tensors:
            self._worker, self._server = _checked(tensors)
        else:
            self._worker, self._server = None, _NOTHING
        self._open = None


def _checked(tensors: dict[str, Tensor]) -> tuple[Tensor, _Owed]:
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
    return worker, _Owed(int(start), server)
