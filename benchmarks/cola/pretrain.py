"""A small GPT-2 that was pre-trained on WikiText-2's sentences, in plain transformers."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, FIRST, LAST, MASK = range(len(SPECIAL))
NO_TARGET = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The sizes of the model and the length of its pre-training."""

    vocabulary: int = 4000
    hidden_size: int = 192
    num_layers: int = 3
    max_tokens: int = 64
    batch_tokens: int = 512
    learning_rate: float = 1e-3
    epochs: int = 1
    seed: int = 0


def sentences_of(text: str) -> list[str]:
    """WikiText's sentences as people write them, but in small letters and without headings."""
    text = re.sub(r" @(.)@ ", r"\1", text).replace("<unk>", "[UNK]")
    text = re.sub(r" (n't|'(?:s|re|ve|ll|d|m)\b)", r"\1", text)
    lines = [line.strip() for line in text.splitlines() if not line.startswith(" =")]
    found = [one.strip() for line in lines for one in re.split(r"(?<= [.?!]) ", line)]
    return [one for one in found if len(one.split()) > 3]


def train_tokenizer(sentences: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """BERT's kind: small letters, pieces of words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=recipe.vocabulary, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", LAST), ("[CLS]", FIRST))
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=recipe.max_tokens,
        **{f"{name}_token": token for name, token in names.items()},
    )


def pretrain(text: str, directory: Path, recipe: Recipe) -> None:
    """Write a model and its tokenizer into a directory."""
    sentences = sentences_of(text)
    tokenizer = train_tokenizer(sentences, recipe)
    encoded = tokenizer(sentences, truncation=True)["input_ids"]
    samples = [torch.tensor(ids) for ids in encoded]
    torch.manual_seed(recipe.seed)
    model = GPT2LMHeadModel(_config(len(tokenizer), recipe)).eval()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    batches = [
        batch for epoch in range(recipe.epochs) for batch in _batches(samples, epoch, recipe)
    ]
    num_steps = len(batches)
    schedule = get_linear_schedule_with_warmup(optimizer, num_steps // 20, num_steps)
    began_s, total = time.perf_counter(), 0.0
    for step, batch in enumerate(batches, 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model, pad_sequence(batch, batch_first=True, padding_value=PAD))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 100 == 0 or step == num_steps:
            took_s = time.perf_counter() - began_s
            sys.stdout.write(
                f"step {step} of {num_steps}: loss {total / 100:.3f}, {took_s:.0f} s\n"
            )
            sys.stdout.flush()
            total = 0.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _config(vocabulary: int, recipe: Recipe) -> GPT2Config:
    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=recipe.hidden_size,
        n_layer=recipe.num_layers,
        n_head=recipe.hidden_size // 64,
        n_positions=recipe.max_tokens,
        bos_token_id=FIRST,
        eos_token_id=LAST,
        pad_token_id=PAD,
    )


def _batches(samples: list[Tensor], epoch: int, recipe: Recipe) -> Iterator[list[Tensor]]:
    """Sentences of like length, about as many tokens each, in a drawn order."""
    order = random.Random(f"{recipe.seed}/{epoch}")
    by_length = sorted(samples, key=lambda one: (len(one), order.random()))
    batches: list[list[Tensor]] = [[]]
    for one in by_length:
        if (len(batches[-1]) + 1) * len(one) > recipe.batch_tokens:
            batches.append([])
        batches[-1].append(one)
    order.shuffle(batches)
    return iter(batches)


def _loss(model: GPT2LMHeadModel, ids: Tensor) -> Tensor:
    """Mean over the next tokens of padded sentences [B, T]."""
    logits = model(input_ids=ids).logits[:, :-1]
    targets = torch.where(ids == PAD, NO_TARGET, ids)[:, 1:]
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NO_TARGET)
