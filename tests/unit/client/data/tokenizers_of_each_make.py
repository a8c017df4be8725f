"""Tokenizers of three kinds, trained on the spot."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXT = [
    "Cats sleep a lot. What is 2+2? It is four, don't you know?",
    "user assistant system tool Below is a task. ### Response: weather in Oslo and Bergen",
    "Größe naïve 日本 🙂 caching sleeping cats' dogs",
] * 4
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def _byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2 and Llama-3; a space belongs to the word behind it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


def _prefix_space() -> Tokenizer:
    """BPE as in Llama-2 (sentencepiece): a space, written as `▁`, in front of a text."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=SPECIAL,
            initial_alphabet=["\n"],
            max_token_length=6,
            show_progress=False,
        ),
    )
    return made


def _word_piece() -> Tokenizer:
    """WordPiece as in BERT: lower case, no spaces, and `##` in front of the rest of a word."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        TEXT,
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False),
    )
    return made


MAKES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": _byte_level,
    "prefix space": _prefix_space,
    "WordPiece": _word_piece,
}


def tokenizer_of(
    make: str, single: str = "$A", template: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer.

    Args:
        make: Kind, one of `MAKES`.
        single: Template of special tokens around a text, such as "<s> $A".
        template: Chat template.
    """
    raw = MAKES[make]()
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    raw.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B",
        special_tokens=[(name, raw.token_to_id(name)) for name in SPECIAL],
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = template
    return made
