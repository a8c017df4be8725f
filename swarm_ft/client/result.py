"""Files of a result beside its weights: config, generation settings, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.protocol.spec.run_spec import RunSpec, TaskKind, TrainOptions
from swarm_ft.stage.adapters import save_adapter_config
from swarm_ft.stage.checkpoint import Checkpoint
from swarm_ft.stage.skeleton import is_bidirectional

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write_result_files(directory: Path, *, checkpoint: Checkpoint, spec: RunSpec) -> None:
    """Write the files that `from_pretrained` of transformers or peft reads beside the weights.

    Args:
        directory: Existing directory.
        checkpoint: Base model of the run.
        spec: Parameters of the run.
    """
    tokenizer = checkpoint.tokenizer()
    if spec.train.gives_adapter:
        save_adapter_config(directory, checkpoint, spec)
    else:
        checkpoint.save_config(
            directory,
            tie_word_embeddings=spec.keeps_tied,
            dtype=spec.result_dtype,
            end_token_ids=spec.train.end_token_ids,
            tokenizer=tokenizer,
        )
    tokenizer.save_pretrained(directory)


def class_lines(
    checkpoint: Checkpoint, train: TrainOptions, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Return lines for people about the token by which a decoder classifies, and padding."""
    if train.task_kind is not TaskKind.CLASSIFICATION or is_bidirectional(checkpoint.config):
        return []
    pad = tokenizer.pad_token_id
    if pad is None:
        return [
            "the classifier reads the last token of a text; the tokenizer has no pad token, so the "
            "result takes one text at a time"
        ]
    lines = [
        f"the classifier reads the last token of a text that is not the pad token, "
        f"{tokenizer.pad_token!r}"
    ]
    if train.gives_adapter and checkpoint.config.pad_token_id != pad:
        lines.append(
            f"for batches of texts, load the base model with pad_token_id={pad}: its config.json "
            f"has none"
        )
    return lines
