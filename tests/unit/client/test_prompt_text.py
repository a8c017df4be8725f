"""Prompts to tokens, and new tokens to text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from swarm_ft.client.generate import GenerationRequest
from swarm_ft.client.prompt_text import NewText, showable, tokenize_prompt
from swarm_ft.errors import BadOption

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def of_bytes() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte; characters may have several."""
    alphabet = sorted(ByteLevel.alphabet())
    words = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")


def of_words() -> PreTrainedTokenizerFast:
    """Return a tokenizer like sentencepiece: the first word of a text loses its space."""
    pieces = [("<unk>", 0.0), *((f"▁{word}", -1.0) for word in ("one", "two", "three"))]
    words = Tokenizer(Unigram(pieces, 0, byte_fallback=False))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def shown(tokenizer: PreTrainedTokenizerFast, prompt: str, text: str) -> list[str]:
    """Return the text shown after each token that follows a prompt."""
    ids = tokenize_prompt(prompt, tokenizer, is_chat=False)
    whole = tokenizer(prompt + text).input_ids
    new = NewText(tokenizer, ids)
    return [*(new.add(token) for token in whole[len(ids) :]), new.end()]


def test_characters_are_shown_when_they_are_whole() -> None:
    pieces = shown(of_bytes(), "a", "bä€🙂c")
    assert pieces == ["b", "", "ä", "", "", "€", "", "", "", "🙂", "c", ""]


def test_half_a_character_is_shown_at_the_end() -> None:
    tokenizer = of_bytes()
    half = tokenizer("ä").input_ids[:1]
    new = NewText(tokenizer, (5,))
    assert (new.add(half[0]), new.end(), new.end()) == ("", "\ufffd", "")


def test_words_keep_the_space_in_front() -> None:
    assert shown(of_words(), "one", " two three") == [" two", " three", ""]


def test_what_ends_a_text_is_not_shown() -> None:
    tokenizer = of_bytes()
    new = NewText(tokenizer, (5,))
    assert new.add(tokenizer.eos_token_id) + new.end() == ""


def test_a_chat_is_asked_by_its_template() -> None:
    tokenizer = of_bytes()
    with pytest.raises(BadOption, match="expected a tokenizer with a chat template"):
        tokenize_prompt("hi", tokenizer, is_chat=True)
    tokenizer.chat_template = TEMPLATE
    ids = tokenize_prompt("hi", tokenizer, is_chat=True)
    assert tokenizer.decode(ids) == "<s>user: hi</s><s>assistant:"
    tokenizer.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(BadOption, match="refuses the prompt: no users"):
        tokenize_prompt("hi", tokenizer, is_chat=True)


def test_nothing_steers_a_terminal() -> None:
    assert showable("a\x1b[2J\r\nb\tc\x9b") == "a [2J \nb\tc "


@pytest.mark.parametrize(
    ("prompt", "new", "positions", "words"),
    [
        ((), 5, None, "prompt: expected a token at least"),
        ((1, 2, 3), 15, 16, "the prompt has 3 tokens, and together they may be 17"),
        ((1, 2, 3), 1 << 15, None, "--max-new-tokens 32768"),
    ],
)
def test_texts_that_are_too_long_are_refused(
    prompt: tuple[int, ...], new: int, positions: int | None, words: str
) -> None:
    wanted = GenerationRequest(prompt=prompt, max_new_tokens=new)
    with pytest.raises(BadOption, match=words):
        wanted.check(positions)


def test_the_last_token_needs_no_position() -> None:
    GenerationRequest(prompt=(1, 2, 3), max_new_tokens=14).check(16)
