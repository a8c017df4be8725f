"""Heads of models by task: the class of transformers, the rows that predict, and the logits.

A head that a checkpoint lacks begins with numbers that follow from the run's seed, by arithmetic
with the same result on every machine.

Shapes: B samples, T tokens, C channels, N targets, K classes or words.
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
"""Model types whose tokens see later tokens, and whose first token classifies a sample."""
FLOAT32_ALONE = frozenset({"deberta"})
"""Model types whose code fails in autocast: it masks bfloat16 scores with the least float32."""


class OutputHead(Protocol):
    """The part of a stage that a head uses."""

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later tokens, as in encoders."""

    def logits(self, hidden_btc: Tensor) -> Tensor:
        """Return the whole model's logits for its last block's output, one row a position."""

    def normalise(self, hidden_btc: Tensor) -> Tensor:
        """Return the normalised output of the last block, without the head."""

    def scores(self, normed: Tensor) -> Tensor:
        """Apply the head alone, a linear layer."""


@dataclass(frozen=True, slots=True)
class Head:
    """The properties of a task's head.

    Attributes:
        auto: Class of transformers that builds the model.
        class_names: Name of the model class by model type.
        words: Description for people.
        examples: Some of the model types.
        is_new: Whether the head may begin with the run, if a checkpoint lacks it.
        select: Selects the rows of a last block's output [B, T, C] that predict a target each, and
            the targets [N], by labels [B, T]. Rows are tokens [N, 1, C], or samples [N, T, C].
        judge: Computes logits [n, K] of some of these rows.
    """

    auto: Any
    class_names: Mapping[str, str]
    words: str
    examples: str
    is_new: bool
    select: Callable[[OutputHead, Tensor, Tensor], tuple[Tensor, Tensor]]
    judge: Callable[[OutputHead, Tensor], Tensor]


def _next_tokens(_: OutputHead, hidden_btc: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Select the tokens that predict the next token: position t predicts that of t + 1."""
    return _tokens(hidden_btc[:, :-1], labels_bt[:, 1:])


def _each(_: OutputHead, hidden_btc: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Select the tokens that have a class."""
    return _tokens(hidden_btc, labels_bt)


def _tokens(hidden_btc: Tensor, targets_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Select tokens with a target, each as a sample of one token."""
    is_target_bt = targets_bt != NO_LABEL
    if bool(is_target_bt.all()):
        return hidden_btc.flatten(0, 1)[:, None], targets_bt.flatten()
    return hidden_btc[is_target_bt][:, None], targets_bt[is_target_bt]


def _of_tokens(stage: OutputHead, rows_n1c: Tensor) -> Tensor:
    """Compute logits of tokens with the whole model's own code."""
    return stage.logits(rows_n1c).flatten(0, 1)


def _of_all(stage: OutputHead, hidden_btc: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Select the tokens with their sample's class; for an encoder, which pools, all tokens."""
    is_target_bt = labels_bt != NO_LABEL
    rows = hidden_btc if stage.is_bidirectional else hidden_btc[is_target_bt][:, None]
    return rows, labels_bt[is_target_bt]


def _of_samples(stage: OutputHead, rows: Tensor) -> Tensor:
    """Compute logits of an encoder's samples [n, T, C], or of a decoder's last tokens [n, 1, C]."""
    if stage.is_bidirectional:
        return stage.logits(rows)
    return stage.scores(stage.normalise(rows)).flatten(0, 1)


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
    """Return the head of a task."""
    return _HEADS[task.kind]


def config_for(task: Task, config: Any) -> Any:  # noqa: ANN401 - transformers' own
    """Return a model's config with a task's classes."""
    if not task.labels:
        return config
    named = copy.deepcopy(config)
    named.id2label = dict(enumerate(task.labels))
    named.label2id = {name: number for number, name in enumerate(task.labels)}
    named.tie_word_embeddings = False  # the head has classes, not words
    return named


def counts_by_class(predicted: Tensor, labels: Tensor, num_classes: int) -> tuple[int, ...]:
    """Return for each class the true positives, all predictions and all labels.

    Args:
        told: Predicted classes, int64 [N].
        there: Labels, int64 [N].
        num_classes: Number of classes.
    """
    of_each = (predicted[predicted == labels], predicted, labels)
    counts = [torch.bincount(one.cpu(), minlength=num_classes) for one in of_each]
    return tuple(torch.cat(counts).tolist())


# ---- weights that begin with drawn numbers


def draw_uniform(seed: str, shape: torch.Size) -> Tensor:
    """Return multiples of 2^-23 in [-1, 1), exact in float32."""
    data = hashlib.shake_128(seed.encode()).digest(4 * shape.numel())
    units = (np.frombuffer(data, "<u4") >> 8).astype(np.float32) - np.float32(1 << 23)
    return torch.from_numpy(units / np.float32(1 << 23)).view(shape)


def initial_tensor(name: str, shape: torch.Size, seed: int, spread: float) -> Tensor:
    """Return a head's initial tensor: biases 0, weights uniform with the model's spread.

    Args:
        name: Name of the tensor.
        shape: Shape of the tensor.
        seed: Seed of the run.
        spread: Standard deviation of weights.
    """
    if len(shape) < 2:
        return torch.zeros(shape)
    # The square root of 3 has the same float on every machine, by IEEE 754.
    return draw_uniform(f"{seed}/head/{name}", shape) * float(np.float32(spread * math.sqrt(3.0)))
