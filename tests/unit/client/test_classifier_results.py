"""Loss and accuracy of a classifier are those of the files that it becomes.

Sources: huggingface/transformers#35352 and #35911 (a text's last token is found by the pad token);
uer/gpt2-chinese-cluecorpussmall on the hub (GPT-2 beside a tokenizer with types of tokens).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from swarm_ft.client.options import JobOptions
from swarm_ft.protocol.spec.run_spec import Adapter, TaskKind, TrainOptions
from swarm_ft.protocol.spec.sample_rows import samples_in
from tests.trained_job import TrainedJob

SPECIALS = ("<s>", "</s>", "<unk>", "<pad>", "<mask>")
BOS, EOS, UNK, PAD, MASK = range(5)
TEXTS = ("cats", "cats sleep", "cats sleep cats", "sleep " * 6, "a b c", "cats b", "b", "c sleep a")


def tokenizer(*, ends: bool, **special: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE that starts texts with <s> and, if `ends`, ends them with </s>."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS * 3, trainer)
    ids = [("<s>", BOS), ("</s>", EOS)]
    form = "<s> $A </s>" if ends else "<s> $A"
    raw.post_processor = processors.TemplateProcessing(
        single=form, pair=f"{form} $B", special_tokens=ids
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
ALL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def llama(vocab_size: int, **changes: Any) -> PretrainedConfig:
    return LlamaConfig(**SIZES, vocab_size=vocab_size, **changes)


def gpt2(vocab_size: int, **changes: Any) -> PretrainedConfig:
    return GPT2Config(
        n_layer=2, n_embd=32, n_head=4, initializer_range=0.3, vocab_size=vocab_size, **changes
    )


def save(config: PretrainedConfig, words: PreTrainedTokenizerBase, directory: Path) -> str:
    torch.manual_seed(3)
    AutoModel.from_config(config).save_pretrained(directory)
    words.save_pretrained(directory)
    return str(directory)


def options_for(model: str, directory: Path, texts: tuple[str, ...], **train: Any) -> JobOptions:
    rows = [{"text": text, "label": ("no", "yes")[i % 2]} for i, text in enumerate(texts)]
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = {
        "task_kind": TaskKind.CLASSIFICATION,
        "seq_length": 24,
        "batch_size": 8,
        "micro_batch_size": 4,
        "learning_rate": 1e-3,
        "forward_codec": "none",
        "backward_codec": "none",
    }
    train_options = TrainOptions(**fields | train)
    return JobOptions(model=model, dataset=str(path), steps=2, train=train_options)


def padded(model: Any, words: Any, texts: tuple[str, ...]) -> torch.Tensor:
    """Return the logits [texts, classes] of one padded batch."""
    logits: torch.Tensor = model(**words(list(texts), padding=True, return_tensors="pt")).logits
    return logits


def singly(model: Any, words: Any, texts: tuple[str, ...]) -> torch.Tensor:
    """Return the logits [texts, classes], one text at a time."""
    return torch.cat([model(**words(text, return_tensors="pt")).logits for text in texts])


def check_result(trained: TrainedJob, model: Any, words: Any, texts: tuple[str, ...]) -> None:
    """Compare the stages' evaluation with transformers, padded and singly."""
    loss, counts = trained.evaluate()
    labels = torch.arange(len(texts)) % 2
    with torch.no_grad():
        for logits in (padded(model, words, texts), singly(model, words, texts)):
            assert cross_entropy(logits, labels).item() == pytest.approx(loss, abs=1e-5)
            right = (logits.argmax(1) == labels).sum()
            assert sum(counts[:2]) == right


CASES: dict[str, tuple[Any, bool, dict[str, str], dict[str, Any]]] = {
    "no pad token": (llama, True, ALL, {}),
    "no pad token, texts without an end": (llama, False, ALL, {}),
    "pad is eos": (llama, True, ALL | {"pad_token": "</s>"}, {}),
    "pad is eos in the config too": (llama, True, ALL | {"pad_token": "</s>"}, {"pad_token_id": 1}),
    "pad of its own": (llama, True, ALL | {"pad_token": "<pad>"}, {"pad_token_id": PAD}),
    "pad is unk": (llama, True, ALL | {"pad_token": "<unk>"}, {}),
    "eos alone": (llama, True, {"eos_token": "</s>"}, {}),
    "another pad in the config": (llama, True, ALL | {"pad_token": "<pad>"}, {"pad_token_id": 1}),
    "pad in the config alone": (llama, True, ALL, {"pad_token_id": UNK}),
    "a word as the config's pad": (llama, False, ALL | {"pad_token": "<pad>"}, {"pad_token_id": 9}),
    "pad of Llama 1": (llama, True, ALL, {"pad_token_id": -1}),
    "gpt2 padded on the left": (
        gpt2,
        False,
        {"eos_token": "</s>", "padding_side": "left"},
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_decoders_class_is_read_where_transformers_reads_it(tmp_path: Path, name: str) -> None:
    make, ends, special, config = CASES[name]
    words = tokenizer(ends=ends, **special)
    model = save(make(len(words), **config), words, tmp_path / "model")
    # Two texts hold the tokens in question, one of them at its end.
    texts = (*TEXTS, "a </s> b <pad> c <unk> cats", "cats </s>", "b <pad><pad>", "c<unk>")
    trained = TrainedJob(options_for(model, tmp_path, texts))
    trained.train(2)
    out = trained.export(tmp_path / "out")
    found = AutoModelForSequenceClassification.from_pretrained(out).eval()
    exported = AutoTokenizer.from_pretrained(out)
    assert found.config.pad_token_id == exported.pad_token_id
    check_result(trained, found, exported, texts)


def test_a_pad_token_beyond_the_vocabulary_is_not_taken(tmp_path: Path) -> None:
    words = tokenizer(ends=True, **ALL)
    vocab_size = len(words)
    words.add_special_tokens({"pad_token": "[PAD]"})
    model = save(llama(vocab_size), words, tmp_path / "model")
    trained = TrainedJob(options_for(model, tmp_path, TEXTS))
    out = trained.export(tmp_path / "out")
    found = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert found.config.pad_token_id == BOS  # no text ends by it
    check_result(trained, found, AutoTokenizer.from_pretrained(out), TEXTS)


def test_without_any_special_token_the_result_takes_one_text_at_a_time(tmp_path: Path) -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer(ends=False).backend_tokenizer)
    model = save(llama(len(words)), words, tmp_path / "model")
    trained = TrainedJob(options_for(model, tmp_path, TEXTS))
    assert "takes one text at a time" in trained.lines[0]
    loss, _ = trained.evaluate()
    out = trained.export(tmp_path / "out")
    found = AutoModelForSequenceClassification.from_pretrained(out).eval()
    with torch.no_grad():
        logits = singly(found, AutoTokenizer.from_pretrained(out), TEXTS)
    labels = torch.arange(len(TEXTS)) % 2
    assert cross_entropy(logits, labels).item() == pytest.approx(loss, abs=1e-5)


def test_types_of_tokens_that_a_model_does_not_know_are_not_in_the_result(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcelpst"]) + "\n")
    words = BertTokenizer(str(vocab))
    assert "token_type_ids" in words("a")
    model = save(gpt2(len(words.get_vocab())), words, tmp_path / "model")
    trained = TrainedJob(options_for(model, tmp_path, TEXTS))
    out = trained.export(tmp_path / "out")
    found = AutoModelForSequenceClassification.from_pretrained(out).eval()
    check_result(trained, found, AutoTokenizer.from_pretrained(out), TEXTS)


@pytest.mark.parametrize("pad", ["<pad>", "</s>"])
@pytest.mark.parametrize("make", [BertConfig, RobertaConfig])
def test_an_encoder_reads_the_first_token(tmp_path: Path, make: Any, pad: str) -> None:
    words = tokenizer(ends=True, **ALL, pad_token=pad, cls_token="<s>", padding_side="left")
    config = make(**SIZES, vocab_size=len(words), pad_token_id=PAD, max_position_embeddings=64)
    model = save(config, words, tmp_path / "model")
    texts = (*TEXTS, "a </s> b <pad> c <unk> cats", "cats </s>")
    trained = TrainedJob(options_for(model, tmp_path, texts))
    out = trained.export(tmp_path / "out")
    found = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert found.config.pad_token_id == PAD
    check_result(trained, found, AutoTokenizer.from_pretrained(out), texts)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_words_have_the_classes_of_the_result(tmp_path: Path, make: Any) -> None:
    words = tokenizer(ends=True, **ALL, padding_side="left")
    model = save(make(len(words)), words, tmp_path / "model")
    texts = (["cats", "sleep"], ["b"], ["a", "b", "cats", "c"])
    rows = [{"tokens": text, "tags": ["X" if w == "cats" else "O" for w in text]} for text in texts]
    options = options_for(model, tmp_path, (), task_kind=TaskKind.TOKEN_CLASSIFICATION)
    Path(options.datasets[0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = TrainedJob(options)
    loss, _ = trained.evaluate()
    out = trained.export(tmp_path / "out")
    found = AutoModelForTokenClassification.from_pretrained(out).eval()
    exported = AutoTokenizer.from_pretrained(out)
    joined = exported([" ".join(text) for text in texts], padding=True, return_tensors="pt")
    of_words = torch.from_numpy(trained_labels(trained, joined.input_ids.shape[1]))
    with torch.no_grad():
        logits = found(**joined).logits
    found_loss = cross_entropy(logits.flatten(0, 1), of_words.flatten(), ignore_index=-100)
    assert found_loss.item() == pytest.approx(loss, abs=1e-5)


def trained_labels(trained: TrainedJob, num_tokens: int) -> Any:
    return samples_in(trained.rows).labels[:, :num_tokens]


@pytest.mark.parametrize("pad", [None, "<pad>", "</s>"])
def test_an_adapter_says_what_batches_need(tmp_path: Path, pad: str | None) -> None:
    """The base's config.json has no pad token; single texts need none."""
    words = tokenizer(ends=True, **ALL, **({"pad_token": pad} if pad else {}))
    model = save(llama(len(words)), words, tmp_path / "model")
    options = options_for(model, tmp_path, TEXTS, adapter=Adapter.LORA, target_modules="all-linear")
    trained = TrainedJob(options)
    trained.train(2)
    out = trained.export(tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(out)
    assert f"pad_token_id={exported.pad_token_id}:" in trained.lines[1]
    base = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=2, pad_token_id=exported.pad_token_id
    )
    check_result(trained, PeftModel.from_pretrained(base, out).eval(), exported, TEXTS)
    if pad is None:
        plain = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
        adapted = PeftModel.from_pretrained(plain, out).eval()
        labels = torch.arange(len(TEXTS)) % 2
        with torch.no_grad():
            alone = cross_entropy(singly(adapted, exported, TEXTS), labels).item()
        assert alone == pytest.approx(trained.evaluate()[0], abs=1e-5)
