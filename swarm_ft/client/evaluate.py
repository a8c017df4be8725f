"""Loss and perplexity of a checkpoint, in this process and uncompressed. Knows no swarm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from swarm_ft.errors import BadDataset, BadModel
from swarm_ft.protocol.spec.sample_rows import (
    MIN_LENGTH,
    NO_LABEL,
    Samples,
    counts_of,
    samples_in,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swarm_ft.client.data.samples import TokenArray


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well a model predicts held-out text.

    Attributes:
        loss: mean cross entropy in nats over all target tokens of all samples.
    """

    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate(
    model_dir: str,
    samples: TokenArray,
    *,
    batch_size: int = 8,
    on_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate a checkpoint in float32, without dropout, on the CPU.

    Args:
        model_dir: directory or hub id.
        samples: rows [samples, seq_length], see `sample_rows`.
        batch_size: samples a forward pass; no effect on the result beyond rounding.
        on_batch: called after each pass.

    Raises:
        BadModel: the checkpoint cannot be loaded, or lacks weights.
        BadDataset: there are no target tokens.
    """
    if samples.ndim != 2 or len(samples) == 0 or samples.shape[1] < MIN_LENGTH:
        raise BadDataset(
            f"evaluation: expected samples of {MIN_LENGTH} or more tokens, got shape "
            f"{samples.shape}"
        )
    model = _load(model_dir)
    loss_sum, num_targets = 0.0, 0
    for start in range(0, len(samples), batch_size):
        rows = samples[start : start + batch_size]
        loss_sum += _loss_sum(model, samples_in(rows))
        num_targets += counts_of(rows).num_targets
        on_batch()
    if num_targets == 0:
        raise BadDataset("evaluation: expected tokens to be predicted; all are only read")
    return Evaluation(loss_sum / num_targets)


def _loss_sum(model: PreTrainedModel, samples: Samples) -> float:
    """Cross entropy summed over the targets of some samples, in float64."""
    labels_bt = torch.from_numpy(samples.labels)
    with torch.no_grad():
        # No mask for what pads them: it stands behind all that is asked about.
        tokens_bt = torch.from_numpy(samples.token_ids)
        logits_btv = model(input_ids=tokens_bt, use_cache=False).logits
        # Sample by sample: the shifted logits of a whole batch would be a second copy of the
        # largest tensor there is.
        losses = [
            cross_entropy(
                logits_tv[:-1].float(), labels_t[1:], reduction="none", ignore_index=NO_LABEL
            )
            .double()
            .sum()
            for logits_tv, labels_t in zip(logits_btv, labels_bt, strict=True)
        ]
    return float(torch.stack(losses).sum())


def _load(model_dir: str) -> PreTrainedModel:
    try:
        with no_transformers_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        reason = str(exc).partition("\n")[0]
        raise BadModel(f"model '{model_dir}': expected a causal language model: {reason}") from exc
    # transformers fills what is missing with random numbers and goes on; their perplexity would
    # be reported as the checkpoint's.
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise BadModel(
            f"model '{model_dir}': {len(info['missing_keys'])} weights are missing ({some})"
        )
    return model.eval()


@contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Keep the progress bars of `transformers` from cutting into ours."""
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()
