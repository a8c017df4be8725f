"""Cross-entropy of the last stage in chunks of targets, so that whole logits never exist.

Logits are the largest tensors of a step: for 4,096 tokens and a vocabulary of 151,936 they take 2.5
GB in float32, and their gradient as much. Here logits, loss and gradient of one chunk of targets
exist at a time, as in Liger Kernel's fused linear cross-entropy (arXiv 2410.10989). The model's own
forward computes the logits, with the caps, scales and biases of each family.

Shape suffixes: n targets, k classes or words. Rows predict the targets, see `Head.select`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, nll_loss

from swarm_ft.protocol.spec.run_spec import BYTES_PER_FLOAT

CHUNK_BYTES = 72 << 20
"""Bytes of a chunk's logits in float32; fixed, so that all replicas add in the same order."""
EVAL_CHUNK_BYTES = 108 << 20
"""Bytes of a chunk's logits without a gradient, which needs no probabilities."""
SLICE_BYTES = 4 << 20
"""Bytes of logits whose probabilities exist at once then; they fit into caches of CPUs."""

Judge = Callable[[Tensor], Tensor]
"""Function that computes float32 logits [n, K] of rows [n, ...], most of the head's work."""


class Chunks:
    """Targets in chunks, with the rows that predict them.

    Args:
        rows: Rows [N, ...], see `Head.select`.
        targets_n: Targets, int64 [N].
        num_outputs: Number of classes or words, K.
    """

    def __init__(self, rows: Tensor, targets_n: Tensor, num_outputs: int) -> None:
        self.rows, self.targets_n = rows, targets_n
        self._target_bytes = num_outputs * BYTES_PER_FLOAT

    @property
    def is_whole(self) -> bool:
        """Whether one chunk has all targets."""
        return len(self.targets_n) <= max(1, CHUNK_BYTES // self._target_bytes)

    def _of(self, num_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Split rows and targets into parts whose logits have this size."""
        return _split(num_bytes // self._target_bytes, self.rows, self.targets_n)

    def loss_and_gradient(
        self, judge: Judge, num_targets: int, after_each: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the loss and the backward pass of the head.

        Gradients of the head's parameters, of the sum divided by `num_targets`, are added to
        theirs.

        Args:
            judge: Function that computes logits.
            num_targets: Targets of the step, whose loss is their mean.
            after_each: Callback after the backward pass of each chunk.

        Returns:
            Sum of cross-entropies, a float32 scalar, and the gradient of the rows, or None if they
            need
            none.
        """
        losses, gradients = [], []
        for rows, targets_n in self._of(CHUNK_BYTES):
            part = rows.detach().requires_grad_(rows.requires_grad)
            loss = self._cross_entropy(judge(part), targets_n)
            losses.append(loss.detach())
            if loss.requires_grad:
                # Autocast covers the forward pass alone, as usual.
                with torch.autocast(part.device.type, enabled=False):
                    (loss / num_targets).backward()  # type: ignore[no-untyped-call]
                if after_each is not None:
                    after_each()
            if part.grad is not None:
                gradients.append(part.grad)
        return torch.stack(losses).sum(), _joined(gradients)

    def _cross_entropy(self, logits_nk: Tensor, targets_n: Tensor) -> Tensor:
        """Sum the cross-entropies.

        A single chunk uses torch's function, with the usual rounding.
        """
        if self.is_whole:
            return cross_entropy(logits_nk, targets_n, reduction="sum")
        loss: Tensor = _CrossEntropy.apply(logits_nk, targets_n)  # type: ignore[no-untyped-call]
        return loss

    def evaluate(self, judge: Judge, *, is_counted: bool) -> tuple[Tensor, Tensor]:
        """Compute the loss without a gradient, and the most likely outputs.

        Returns:
            Sum of cross-entropies, and predictions, int64 [N], or [0] unless `is_counted`.
        """
        found = [
            _evaluated(judge(rows), targets_n, is_counted)
            for rows, targets_n in self._of(EVAL_CHUNK_BYTES)
        ]
        losses, predictions = zip(*found, strict=True)
        return torch.stack(losses).sum(), torch.cat(predictions)


def _joined(gradients: list[Tensor]) -> Tensor | None:
    if not gradients:
        return None
    return torch.cat(gradients) if len(gradients) > 1 else gradients[0]


def _split(size: int, one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(*(torch.split(each, max(1, size)) for each in (one, other)), strict=True)


def _evaluated(logits_nk: Tensor, targets_n: Tensor, is_counted: bool) -> tuple[Tensor, Tensor]:
    slices = _split(SLICE_BYTES // max(1, logits_nk[:1].nbytes), logits_nk, targets_n)
    losses = [cross_entropy(*one, reduction="sum") for one in slices]
    return torch.stack(losses).sum(), logits_nk.argmax(1) if is_counted else targets_n[:0]


class _Context(Protocol):
    """The context of torch for one call."""

    saved_tensors: tuple[Tensor, Tensor]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _CrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies whose backward pass needs no more memory than its forward.

    torch's own function holds three tensors of the logits' size at once, this one two. It supports
    one backward pass only.
    """

    @staticmethod
    def forward(ctx: _Context, logits_nk: Tensor, targets_n: Tensor) -> Tensor:
        log_probabilities_nk = torch.log_softmax(logits_nk, 1)
        ctx.save_for_backward(log_probabilities_nk, targets_n)
        return nll_loss(log_probabilities_nk, targets_n, reduction="sum")

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        log_probabilities_nk, targets_n = ctx.saved_tensors
        (scale,) = gradients
        gradient_nk = log_probabilities_nk.exp_().mul_(scale)
        at_targets_n1 = targets_n[:, None]
        gradient_nk.scatter_(1, at_targets_n1, gradient_nk.gather(1, at_targets_n1) - scale)
        return gradient_nk, None
