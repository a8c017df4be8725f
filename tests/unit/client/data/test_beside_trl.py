"""Samples equal those that TRL's own preparation makes of the same rows.

The data is random; the formats are those of https://huggingface.co/docs/trl/dataset_formats.
Intended differences are listed in docs/how-to/prepare-data.md, each with a test here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.sources import open_dataset
from swarm_ft.client.data.special_tokens import special_tokens_of
from swarm_ft.client.options import PackingStrategy, ReadOptions, Truncation
from swarm_ft.client.prompt_text import tokenize_prompt
from swarm_ft.protocol.spec.sample_rows import starts_in, targets_in, token_ids_of
from tests.unit.client.data.tokenizers_of_each_make import MAKES, tokenizer_of
from tests.unit.client.data.trl_samples import Sample, quiet, trl_samples

BEGINS = ("$A", "<s> $A")
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    *("Cats", "sleep", "a", "lot.", "What", "is", "2+2?", "don't", "Größe", "naïve", "日本", "🙂"),
    *("caching", "\n", "  ", "\t", "weather", "Oslo", "xyzzy", "###", "e\u0301"),
)
PACKINGS: dict[str, dict[str, Any]] = {
    "unpacked": {},
    "wrapped": {"packing": True, "packing_strategy": "wrapped"},
    "bfd": {"packing": True},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split"},
}


def drawn_text(draw: random.Random, most: int = 12) -> str:
    drawn = draw.choice(("", " ")).join(
        draw.choice(WORDS) + draw.choice(("", " ")) for _ in range(draw.randint(1, most))
    )
    return drawn if drawn.strip() else drawn_text(draw, most)


def text(draw: random.Random) -> dict[str, Any]:
    return {"text": drawn_text(draw) + draw.choice(("", "", "</s>"))}


def pair(draw: random.Random) -> dict[str, Any]:
    return {"prompt": drawn_text(draw), "completion": drawn_text(draw) + draw.choice(("", "</s>"))}


def chat(draw: random.Random) -> dict[str, Any]:
    return {"messages": drawn_messages(draw, draw.randint(1, 2))}


def drawn_messages(draw: random.Random, turns: int) -> list[dict[str, str]]:
    roles = draw.choice(([], ["system"])) + ["user", "assistant"] * turns
    return [{"role": role, "content": f"a{drawn_text(draw, 4)}b"} for role in roles]


Draw = Callable[[random.Random], dict[str, Any]]
FORMATS: dict[str, tuple[Draw, dict[str, Any]]] = {
    "language modelling": (text, {}),
    "prompt-completion": (pair, {}),
    "prompt-completion, all learned": (pair, {"completion_only_loss": False}),
    "conversational": (chat, {}),
    "conversational, assistant only": (chat, {"assistant_only_loss": True}),
}


def our_samples(
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    max_length: int,
    **options: Any,
) -> list[Sample]:
    """Return the samples that a client would submit, in the form of `trl_samples`."""
    return read(rows, tokenizer, folder, max_length=max_length, **options)[0]


def read(
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    max_length: int = 64,
    **options: Any,
) -> tuple[list[Sample], str]:
    """Return our samples and all lines that the client prints about them."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    strategy = options.pop("packing_strategy", "bfd")
    if strategy == "bfd_split":
        options["truncation"] = Truncation.SPLIT
    elif strategy == "wrapped":
        options["packing_strategy"] = PackingStrategy.WRAPPED
    data = open_dataset(str(path), DataSelection(), ReadOptions(**options), tokenizer)
    samples = data.samples(max_length, len(tokenizer))
    rows_of_words = [samples.tokens[index : index + 1] for index in range(len(samples.tokens))]
    return list(map(_sample_of, rows_of_words)), "\n".join([*data.describe(), samples.words])


def _sample_of(row: Any) -> Sample:
    ids = token_ids_of(row[0]).tolist()
    learned = np.flatnonzero(targets_in(row)[0]).tolist()
    starts = np.flatnonzero(starts_in(row)[0]).tolist()
    parts = np.split(np.arange(len(ids)), starts)
    return Sample(ids, learned, [place for part in parts for place in range(len(part))])


@pytest.fixture(scope="module")
def tokenizers() -> Mapping[tuple[str, str], PreTrainedTokenizerFast]:
    return {(make, begin): tokenizer_of(make, begin, CHATML) for make in MAKES for begin in BEGINS}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled(5)
def test_samples_are_those_of_trl(
    tokenizers: Mapping[tuple[str, str], PreTrainedTokenizerFast],
    tmp_path: Path,
    name: str,
    make: str,
    begin: str,
    packing: str,
) -> None:
    """Compare token ids, learned tokens and positions, also of documents longer than a sample."""
    row, options = FORMATS[name]
    draw = random.Random(f"{name}{make}{begin}")
    rows = [row(draw) for _ in range(40)]
    tokenizer = tokenizers[make, begin]
    options_of_trl = {"max_length": 24, **options, **PACKINGS[packing]}
    assert our_samples(rows, tokenizer, tmp_path, **options_of_trl) == trl_samples(
        rows, tokenizer, **options_of_trl
    )


# ---- differences, each of which is in docs/how-to/prepare-data.md and is printed when it applies


def test_an_end_that_the_tokenizer_puts_itself_stands_once(tmp_path: Path) -> None:
    """TRL adds the end and tokenises it with the text: h2oai/h2o-llmstudio#636."""
    tokenizer = tokenizer_of("byte-level BPE", "<s> $A </s>")
    (theirs,) = trl_samples([{"text": "Cats"}], tokenizer, max_length=64)
    (ours,), printed = read([{"text": "Cats"}], tokenizer, tmp_path)
    assert theirs.ids == [*ours.ids, tokenizer.eos_token_id]
    assert ours.ids[-2:].count(tokenizer.eos_token_id) == 1
    assert "</s>: the tokenizer adds it behind texts" in printed


def test_a_beginning_in_the_text_stands_once(tmp_path: Path) -> None:
    """A chat that a template rendered into a column: huggingface/trl#1400."""
    tokenizer = tokenizer_of("byte-level BPE", "<s> $A")
    (theirs,) = trl_samples([{"text": "<s>Cats"}], tokenizer, max_length=64)
    (ours,), printed = read([{"text": "<s>Cats"}], tokenizer, tmp_path)
    assert theirs.ids == [tokenizer.bos_token_id, *ours.ids]
    assert ours.ids.count(tokenizer.bos_token_id) == 1
    assert "1 document already with the tokenizer's leading tokens" in printed


def test_documents_without_text_are_left_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte-level BPE")
    rows = [{"text": " "}, {"text": "Cats"}]
    blank, theirs = trl_samples(rows, tokenizer, max_length=64)
    ours, printed = read(rows, tokenizer, tmp_path)
    assert (blank.ids[-1], ours) == (tokenizer.eos_token_id, [theirs])
    assert "1 document without text left out" in printed


def test_chats_without_an_answer_are_left_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte-level BPE", "$A", CHATML)
    user = {"role": "user", "content": "Cats"}
    rows = [{"messages": [user]}, {"messages": [user, {"role": "assistant", "content": "a"}]}]
    with pytest.raises(RuntimeError, match="at least one example has no assistant tokens"):
        trl_samples(rows, tokenizer, max_length=64, assistant_only_loss=True)
    ours, printed = read(rows, tokenizer, tmp_path, assistant_only_loss=True)
    assert ours == trl_samples(rows[1:], tokenizer, max_length=64, assistant_only_loss=True)
    assert "1 sample without learned tokens left out" in printed


def test_an_answer_in_white_space_keeps_its_place(tmp_path: Path) -> None:
    """Check answers that transformers skips because their white space has no token."""
    tokenizer = tokenizer_of("WordPiece", "$A", CHATML)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "what"},
                {"role": "assistant", "content": "cats"},
                {"role": "user", "content": "what"},
                {"role": "assistant", "content": " dogs"},
            ]
        }
    ]
    (theirs,) = trl_samples(rows, tokenizer, max_length=64, assistant_only_loss=True)
    (ours,), printed = read(rows, tokenizer, tmp_path, assistant_only_loss=True)
    assert ours.ids == theirs.ids
    assert theirs.learned == ours.learned[: len(theirs.learned)] != ours.learned
    assert "the tokenizer has no white space tokens" in printed


@pytest.mark.parametrize(
    ("make", "is_printed"), [("byte-level BPE", False), ("prefix space", True)]
)
def test_line_breaks_of_several_tokens_are_printed(
    tmp_path: Path, make: str, is_printed: bool
) -> None:
    """Check the note; test_chats_beside_trl checks the difference itself."""
    rows = [chat(random.Random(1))]
    tokenizer = tokenizer_of(make, "$A", CHATML)
    _, printed = read(rows, tokenizer, tmp_path, assistant_only_loss=True)
    assert ("a line break behind a special token as several tokens" in printed) is is_printed


@pytest.mark.parametrize("single", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("make", MAKES)
def test_generation_asks_by_the_tokens_that_training_answered(
    tmp_path: Path, make: str, single: str
) -> None:
    """Regression: EleutherAI/lm-evaluation-harness#2049, unslothai/unsloth#7903 (BOS)."""
    tokenizer = tokenizer_of(make, single)
    row = {"prompt": "Cats sleep", "completion": " a lot."}
    (sample,), _ = read([row], tokenizer, tmp_path)
    prompt = tokenize_prompt(row["prompt"], tokenizer, is_chat=False)
    assert sample.ids[: sample.learned[0]] == list(prompt)
    assert sample.ids.count(tokenizer.eos_token_id) == 1
    assert (prompt[0] == tokenizer.bos_token_id) is single.startswith("<s>")


@pytest.mark.parametrize("single", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_special_tokens_are_found_of_an_alphabet_of_its_own(single: str) -> None:
    vocab = {"</s>": 0, "<s>": 1, "ж": 2}
    raw = Tokenizer(models.BPE(vocab, []))
    raw.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    assert tokenizer("a", add_special_tokens=False).input_ids == []
    leading, trailing = special_tokens_of(tokenizer)
    assert [*leading, 2, *trailing] == tokenizer("ж").input_ids


@pytest.mark.parametrize("name", ["gemma", "lfm2", "llama3", "qwen3_instruct_2507"])
def test_answers_without_marks_are_those_of_trls_marked_templates(
    tmp_path: Path, name: str
) -> None:
    """Compare models' own templates with TRL's marked copies."""
    with quiet():
        import trl
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    tokenizer = tokenizer_of("byte-level BPE", "$A", file.read_text())
    draw = random.Random(name)
    rows = [
        {"messages": [one for one in chat(draw)["messages"] if one["role"] != "system"]}
        for _ in range(10)
    ]
    options: dict[str, Any] = {"max_length": 400, "assistant_only_loss": True}
    ours, printed = read(rows, tokenizer, tmp_path, **options)
    assert ours == trl_samples(rows, tokenizer, **options)
    assert "the chat template does not mark answers" in printed


def test_plain_text_is_one_stream_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte-level BPE", "<s> $A")
    (tmp_path / "a.txt").write_text("Cats sleep a lot. " * 9)
    data = open_dataset(str(tmp_path / "a.txt"), DataSelection(), ReadOptions(), tokenizer)
    tokens = data.samples(8, len(tokenizer)).tokens.ravel().tolist()
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(tokens)
    assert "<s>: the tokenizer adds it in front of texts; plain text is cut without it" in (
        "\n".join(data.describe())
    )
