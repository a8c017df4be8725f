"""Samples by TRL's own preparation and collator; nothing is trained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import datasets
from transformers import PreTrainedTokenizerFast

Rows = Sequence[Mapping[str, Any]]


class Sample(NamedTuple):
    """Sample as the model receives it.

    Attributes:
        ids: Token ids.
        learned: Indices of learned tokens, without the first, which nothing predicts.
        positions: Position of each token in its document, as far as the sample determines it.
    """

    ids: list[int]
    learned: list[int]
    positions: list[int]


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore deprecation warnings of TRL and transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trl_samples(
    rows: Rows, tokenizer: PreTrainedTokenizerFast, *, max_length: int, **options: Any
) -> list[Sample]:
    """Prepare rows as `SFTTrainer` does, and collate them in one batch.

    Samples without learned tokens are left out.

    Args:
        rows: Rows in one of TRL's formats.
        tokenizer: Tokenizer of the model.
        max_length: Maximum number of tokens of a sample.
        options: Options of `SFTConfig`.

    Raises:
        RuntimeError, ValueError: TRL refuses the rows or the options.
    """
    with quiet():
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers
        from trl.trainer.sft_config import SFTConfig
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

        args = SFTConfig(
            max_length=max_length, report_to="none", bf16=False, use_cpu=True, **options
        )
        # As in `SFTTrainer.__init__`.
        template = None
        if args.assistant_only_loss and not has_generation_markers(tokenizer.chat_template):
            template = get_training_chat_template(tokenizer)
        is_answered = args.completion_only_loss
        if is_answered is None:
            is_answered = "prompt" in rows[0] and "completion" in rows[0]
        trainer: Any = SimpleNamespace(
            _tokenizer=tokenizer, chat_template=template, completion_only_loss=is_answered
        )
        datasets.disable_progress_bars()
        prepared = SFTTrainer._prepare_dataset(  # noqa: SLF001 - a trainer needs a model besides
            trainer,
            datasets.Dataset.from_list([dict(row) for row in rows]),
            tokenizer,
            args,
            args.packing,
            None,
            "train",
        )
        is_padding_free = args.packing and args.packing_strategy != "wrapped"
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=is_padding_free)
        samples = [_sample_of(collate([example])) for example in prepared]
    return [sample for sample in samples if sample.learned]


def _sample_of(batch: Mapping[str, Any]) -> Sample:
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    positions = batch["position_ids"][0].tolist() if "position_ids" in batch else range(len(ids))
    learned = [place for place, label in enumerate(labels) if place and label != -100]
    return Sample(ids, learned, list(positions))
