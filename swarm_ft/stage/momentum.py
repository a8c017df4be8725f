"""The first moment as what replicas sum: AQ-SGD's end-to-end scheme (arXiv 2206.01299).

With n replicas, the moment m that all have and their gradients g_i, member i gives
beta1 m / n + (1 - beta1) g_i. The sum M is the moment that the step leads to, but for the clipping
of gradients, whose factor nobody knows before the sum. So M is turned back into the gradient
that it stands for, and AdamW goes on from that as from any: norm and clipping are that gradient's,
and what AdamW makes its first moment is M again.

The second moment is of that gradient too. In the published code it is frozen after a warm-up while
its bias correction goes on, so that steps grow with the run; nothing is frozen here.
"""

from __future__ import annotations

from torch import Tensor

BETA1, BETA2 = 0.9, 0.999
"""Of every stage's AdamW."""


def momentum_share(momentum: Tensor, gradient: Tensor, num_members: int) -> Tensor:
    """One member's share of the next first moment, float32 [n].

    Args:
        momentum: the present one, float32 [n], the same at all members.
        gradient: this member's, float32 [n]; those of all members add up to the step's.
        num_members: how many shares there will be.
    """
    return momentum * (BETA1 / num_members) + gradient * (1 - BETA1)


def gradient_from_momentum(total: Tensor, momentum: Tensor) -> Tensor:
    """The gradient that leads from `momentum` to the sum of all shares; all float32 [n]."""
    return (total - BETA1 * momentum) / (1 - BETA1)
