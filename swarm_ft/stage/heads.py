"""What a model ends in, by its task: which class of transformers it is, and what it is asked.

Where a checkpoint lacks a task's head, that begins with numbers that follow from the run's seed,
by arithmetic that has one result on every machine.

Shapes: B samples, T tokens, C channels, N targets, K what a target is one of.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from swarm_ft.protocol.spec.run_spec import TaskKind
from swarm_ft.protocol.spec.sample_rows import NO_LABEL
from swarm_ft.protocol.spec.tasks import Task

ENCODERS = frozenset(
    {"bert", "camembert", "deberta", "deberta-v2", "electra", "roberta", "xlm-roberta"}
)
"""Types whose tokens see those behind them, and whose first token tells a sample's class."""
FLOAT32_ALONE = frozenset({"deberta"})
"""Types whose own code fails in autocast: it masks scores in bfloat16 with the least float32."""


class Ending(Protocol):
    """A stage, as a head needs it."""

    @property
    def sees_all(self) -> bool:
        """Whether tokens see those behind them, as in encoders."""

    def logits(self, hidden_btc: Tensor) -> Tensor:
        """What the whole model makes of its last block's output, a row of logits for each."""

    def normed(self, hidden_btc: Tensor) -> Tensor:
        """The same without the head."""

    def scores(self, normed: Tensor) -> Tensor:
        """The head alone, a linear layer."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a task asks of a model.

    Attributes:
        auto: builds the model.
        class_names: what it builds, of each type of model that it can.
        words: what it is, for people.
        examples: some of the types.
        is_new: whether it may begin with the run, where a checkpoint lacks it.
        select: the rows of a last block's output [B, T, C] that predict a target each, and these
            [N], by labels [B, T]. Rows are tokens [N, 1, C], or whole samples [N, T, C].
        judge: logits [n, K] of some of these rows.
    """

    auto: Any
    class_names: Mapping[str, str]
    words: str
    examples: str
    is_new: bool
    select: Callable[[Ending, Tensor, Tensor], tuple[Tensor, Tensor]]
    judge: Callable[[Ending, Tensor], Tensor]


def _next_tokens(_: Ending, hidden_btc: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Select the tokens that predict the token behind them: position t that of t + 1."""
    return _tokens(hidden_btc[:, :-1], labels_bt[:, 1:])


def _each(_: Ending, hidden_btc: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Select the tokens that have a class."""
    return _tokens(hidden_btc, labels_bt)


def _tokens(hidden_btc: Tensor, targets_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Select tokens with a target, each as a sample of one token: any model has its position."""
    is_target_bt = targets_bt != NO_LABEL
    if bool(is_target_bt.all()):
        return hidden_btc.flatten(0, 1)[:, None], targets_bt.flatten()
    return hidden_btc[is_target_bt][:, None], targets_bt[is_target_bt]


def _of_tokens(stage: Ending, rows_n1c: Tensor) -> Tensor:
    """Compute logits of tokens by the whole model's own code."""
    return stage.logits(rows_n1c).flatten(0, 1)


def _of_all(stage: Ending, hidden_btc: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Select the tokens that have their sample's class; all tokens where an encoder pools them."""
    is_target_bt = labels_bt != NO_LABEL
    rows = hidden_btc if stage.sees_all else hidden_btc[is_target_bt][:, None]
    return rows, labels_bt[is_target_bt]


def _of_samples(stage: Ending, rows: Tensor) -> Tensor:
    """Compute logits of an encoder's samples [n, T, C], or of a decoder's last tokens [n, 1, C]."""
    if stage.sees_all:
        return stage.logits(rows)
    return stage.scores(stage.normed(rows)).flatten(0, 1)


_KNOWN = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | ENCODERS


def _of_known(class_names: Mapping[str, str]) -> Mapping[str, str]:
    return {model_type: name for model_type, name in class_names.items() if model_type in _KNOWN}


_HEADS = {
    TaskKind.CAUSAL_LM: Head(
        AutoModelForCausalLM,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "a decoder that AutoModelForCausalLM",
        "gpt2, llama or qwen3",
        False,
        _next_tokens,
        _of_tokens,
    ),
    TaskKind.CLASSIFICATION: Head(
        AutoModelForSequenceClassification,
        _of_known(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        "a model that AutoModelForSequenceClassification",
        "gpt2, llama or bert",
        True,
        _of_all,
        _of_samples,
    ),
    TaskKind.TOKEN_CLASSIFICATION: Head(
        AutoModelForTokenClassification,
        _of_known(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        "a model that AutoModelForTokenClassification",
        "gpt2, llama or bert",
        True,
        _each,
        _of_tokens,
    ),
}


def head_of(task: Task) -> Head:
    """What a task asks of a model."""
    return _HEADS[task.kind]


def config_for(task: Task, config: Any) -> Any:  # noqa: ANN401 - transformers' own
    """A model's config with a task's classes in it."""
    if not task.labels:
        return config
    named = copy.deepcopy(config)
    named.id2label = dict(enumerate(task.labels))
    named.label2id = {name: number for number, name in enumerate(task.labels)}
    named.tie_word_embeddings = False  # there are no words at its end
    return named


def counts_by_class(told: Tensor, there: Tensor, num_classes: int) -> tuple[int, ...]:
    """Of each class, targets that are told rightly, told so, and are so.

    Args:
        told: [N], int64.
        there: [N], so too.
        num_classes: how many there are.
    """
    of_each = (told[told == there], told, there)
    counts = [torch.bincount(one.cpu(), minlength=num_classes) for one in of_each]
    return tuple(torch.cat(counts).tolist())


# ---- weights that begin with drawn numbers


def drawn(seed: str, shape: torch.Size) -> Tensor:
    """Multiples of 2^-23 in [-1, 1), exact in float32."""
    data = hashlib.shake_128(seed.encode()).digest(4 * shape.numel())
    units = (np.frombuffer(data, "<u4") >> 8).astype(np.float32) - np.float32(1 << 23)
    return torch.from_numpy(units / np.float32(1 << 23)).view(shape)


def begun(name: str, shape: torch.Size, seed: int, spread: float) -> Tensor:
    """A head's tensor as it begins: biases 0, weights even, as wide as the model's own.

    Args:
        name: of the tensor.
        shape: its own.
        seed: the run's.
        spread: standard deviation of weights.
    """
    if len(shape) < 2:
        return torch.zeros(shape)
    # The square root of 3, to a float's bits, is the same everywhere: IEEE 754 says so.
    return drawn(f"{seed}/head/{name}", shape) * float(np.float32(spread * math.sqrt(3.0)))
