"""The loss that keeps a mixture's experts evenly used, block by block.

For one block it is the loss of Switch (arXiv 2101.03961, equations 4 to 6). It is the sum over its
E experts of the share of tokens that chose the expert, times the router's mean probability, times
E. For an even router it is the number of experts that a token chooses. transformers takes the means
over all blocks and multiplies then, which is no sum over stages. Here each block has its loss, as
in the paper, and their mean over the model's blocks counts.

Shape suffixes: n tokens, samples times tokens each; e experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.run_spec import TrainOptions
from swarm_ft.protocol.spec.tasks import task_of
from swarm_ft.stage.architecture import anatomy_of
from swarm_ft.stage.skeleton import ROUTER_LOGITS, ModelConfig, base_of


def check_routers(config: ModelConfig, options: TrainOptions) -> None:
    """Check that the model's routers report their choices, if the run uses their loss.

    Raises:
        BadOption: The model has no such routers.
    """
    if not options.router_aux_loss_coef:
        return
    base = base_of(anatomy_of(config, task_of(options)).skeleton)[1]
    recorded = getattr(base, "_can_record_outputs", None) or {}
    if ROUTER_LOGITS not in recorded or not experts_per_token(config):
        raise BadOption(
            "--router-aux-loss-coef: expected a mixture of experts whose routers report their "
            f"choices, got architecture '{config.model_type}'"
        )


def experts_per_token(config: ModelConfig) -> int:
    """Return the number of experts for a token; 0 for a model without experts."""
    return int(getattr(config, "num_experts_per_tok", None) or 0)


def balance_loss(logits: Sequence[Tensor], num_chosen: int, is_token: Tensor | None) -> Tensor:
    """Return the sum of the losses of some blocks, a scalar.

    Args:
        logits: Router logits of each block, [N, E]; at least one.
        num_chosen: Number of experts for a token.
        is_token: Mask, bool [N], False in padding; None if there is none.
    """
    return torch.stack([_of_block(one.float(), num_chosen, is_token) for one in logits]).sum()


def _of_block(logits_ne: Tensor, num_chosen: int, is_token: Tensor | None) -> Tensor:
    if is_token is not None:
        logits_ne = logits_ne[is_token]
    probabilities_ne = logits_ne.softmax(1)
    chosen_ne = torch.zeros_like(probabilities_ne).scatter_(
        1, probabilities_ne.topk(num_chosen, 1).indices, 1.0
    )
    shares_e = chosen_ne.mean(0)
    return logits_ne.shape[1] * (shares_e * probabilities_ne.mean(0)).sum()
