"""Input of the demo, made on the spot: Python's source text and a small random GPT-2.

Reads the standard library's files and writes a checkpoint; downloads and trains nothing.
"""

from __future__ import annotations

import sysconfig
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from swarm_ft.client.data.text_files import read_file
from swarm_ft.errors import BadDataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# These pure-Python modules are in every supported Python, about 70k and 18k characters. They are
# few, so that a minute of training visits each sample several times.
TRAIN_MODULES = ("bisect", "calendar", "cmd", "contextlib")
EVAL_MODULES = ("queue", "sched")

NUM_HEADS = 4
NUM_POSITIONS = 256
# GPT-2's own 0.02 suits a width of 768; a narrow model learns sooner from larger weights.
INITIALIZER_RANGE = 0.05
_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoInput:
    """Paths of the demo's input: a Hugging Face checkpoint directory and two text files."""

    model_dir: str
    train_file: str
    eval_file: str


def write_demo_input(
    directory: Path,
    *,
    seed: int,
    num_layers: int = 6,
    hidden_size: int = 128,
    vocab_size: int = 512,
    tied_embeddings: bool = False,
) -> DemoInput:
    """Write text, tokenizer and model below `directory`, in well under a second.

    The same arguments give the same files with one version of Python, torch and tokenizers.

    Args:
        directory: Target directory; created if needed.
        seed: Seed of the model's random weights.
        num_layers: Number of transformer blocks.
        hidden_size: Width, a multiple of four heads.
        vocab_size: Size of the byte-level BPE vocabulary; at least 257.
        tied_embeddings: Whether the head shares the weights of the token embeddings, as in GPT-2.

    Raises:
        BadDataset: This Python has no readable sources of its standard library.
    """
    train_text, eval_text = _sources(TRAIN_MODULES), _sources(EVAL_MODULES)
    model_dir = directory / "model"
    model_dir.mkdir(parents=True, exist_ok=True)
    train_file, eval_file = directory / "train.txt", directory / "heldout.txt"
    train_file.write_text(train_text, encoding="utf-8", newline="")
    eval_file.write_text(eval_text, encoding="utf-8", newline="")
    tokenizer = _train_tokenizer(train_text, vocab_size)
    tokenizer.save_pretrained(model_dir)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=NUM_POSITIONS,
        n_embd=hidden_size,
        n_layer=num_layers,
        n_head=NUM_HEADS,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=tied_embeddings,
    )
    _save_model(model_dir, config, seed)
    return DemoInput(model_dir=str(model_dir), train_file=str(train_file), eval_file=str(eval_file))


def _sources(modules: Iterable[str]) -> str:
    """Return the source text of standard library modules, joined by newlines."""
    library = Path(sysconfig.get_path("stdlib"))
    try:
        return "\n".join(read_file(library / f"{name}.py") for name in modules)
    except BadDataset as exc:
        raise BadDataset(
            f"the sample needs the source text of Python's standard library: {exc.message}; "
            "name your own with --model and --dataset"
        ) from exc


def _train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END_OF_TEXT)


def _save_model(model_dir: Path, config: GPT2Config, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
    with no_transformers_bars():
        model.save_pretrained(model_dir)


@contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Disable the progress bars of `transformers`, which would interleave with ours."""
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()
