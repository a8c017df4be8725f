"""The files of a result describe the training, name no code, and mark where chats end.

Sources: huggingface/setfit#428 and fast-bert#226 (problem_type); LlamaFactory#7107, GLM-4#612 and
Megatron-Bridge#917 (auto_map); LlamaFactory#7454, Qwen3#927 and ms-swift#3113 (eos after chats).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from swarm_ft.client.options import JobOptions
from swarm_ft.client.stop_tokens import turn_stop_token
from swarm_ft.errors import BadModel
from swarm_ft.protocol.spec.run_spec import Adapter, TaskKind, TrainOptions
from tests.trained_job import TrainedJob

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>", "<end_of_turn>")
END, IM_START, IM_END, EOS, END_OF_TURN = range(5)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = {
    "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."}]
}


def tokenizer(template: str | None = CHATML, eos: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=list(SPECIALS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    raw.train_from_iterator(["user assistant Four."], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos)
    made.chat_template = template
    return made


def save(directory: Path, words: PreTrainedTokenizerFast, **config: Any) -> Path:
    """Save a base model, which ends texts with <|endoftext|>, and its tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    made = LlamaConfig(
        **sizes, num_attention_heads=4, vocab_size=len(words), **{"eos_token_id": END} | config
    )
    AutoModelForCausalLM.from_config(made).save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


def trained(model: Path, rows: list[dict[str, Any]], **train: Any) -> TrainedJob:
    data = model.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = {
        "seq_length": 48,
        "batch_size": 2,
        "micro_batch_size": 2,
        "forward_codec": "none",
        "backward_codec": "none",
    }
    options = TrainOptions(**fields | train)
    return TrainedJob(JobOptions(model=str(model), dataset=str(data), steps=1, train=options))


def eos_of(directory: Path) -> Any:
    return GenerationConfig.from_pretrained(directory).eos_token_id


def rows_of_classes() -> list[dict[str, Any]]:
    return [{"text": f"cats {i}", "label": ("no", "yes")[i % 2]} for i in range(8)]


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("before", ["multi_label_classification", "regression"])
def test_problem_type_is_what_was_trained(tmp_path: Path, before: str) -> None:
    model = save(tmp_path / "model", tokenizer(), problem_type=before)
    job = trained(model, rows_of_classes(), task_kind=TaskKind.CLASSIFICATION)
    out = job.export(tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["problem_type"] == (
        "single_label_classification"
    )
    found = AutoModelForSequenceClassification.from_pretrained(out).eval()
    words = AutoTokenizer.from_pretrained(out)
    texts = [row["text"] for row in rows_of_classes()]
    labels = torch.arange(8) % 2
    with torch.no_grad():
        loss = found(**words(texts, padding=True, return_tensors="pt"), labels=labels).loss
    assert loss.item() == pytest.approx(job.evaluate()[0], abs=1e-5)


def test_a_language_model_has_no_problem_type(tmp_path: Path) -> None:
    model = save(tmp_path / "model", tokenizer(), problem_type="multi_label_classification")
    out = trained(model, [{"text": "cats " * 20}]).export(tmp_path / "out")
    assert "problem_type" not in json.loads((out / "config.json").read_text())


def test_no_file_names_code(tmp_path: Path) -> None:
    model = save(tmp_path / "model", tokenizer())
    code = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"}
    change(model / "config.json", auto_map=code, custom_pipelines={"x": {"impl": "x.Pipeline"}})
    change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.X", None]})
    out = trained(model, [{"text": "cats " * 20}]).export(tmp_path / "out")
    for file in ("config.json", "tokenizer_config.json"):
        assert not {"auto_map", "custom_pipelines"} & json.loads((out / file).read_text()).keys()
    # It would look for configuration_x.py, which is not there.
    assert AutoConfig.from_pretrained(out, trust_remote_code=True).model_type == "llama"
    AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    AutoTokenizer.from_pretrained(out, trust_remote_code=True)


TEMPLATES = {
    "chatml": (CHATML, IM_END),
    "gemma": (
        "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}"
        "<end_of_turn>\n{% endfor %}",
        END_OF_TURN,
    ),
    "zephyr": (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] + eos_token }}\n{% endfor %}",
        END,
    ),
    "phi-3, which adds the end of the text": (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{{ eos_token }}",
        IM_END,
    ),
    "mistral": (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}",
        EOS,
    ),
    "alpaca, which ends by no token": (
        "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}",
        None,
    ),
    "one that refuses": ("{{ raise_exception('no') }}", None),
    "none": (None, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_is_the_templates(name: str) -> None:
    template, expected = TEMPLATES[name]
    assert turn_stop_token(tokenizer(template)) == expected


@pytest.mark.parametrize("own", [None, END, [END, EOS]])
def test_after_chats_generation_stops_at_the_end_of_a_turn(tmp_path: Path, own: Any) -> None:
    model = save(tmp_path / "model", tokenizer())
    (model / "generation_config.json").unlink()
    if own is not None:
        text = {"eos_token_id": own, "temperature": 0.7, "do_sample": False}
        (model / "generation_config.json").write_text(json.dumps(text))
    job = trained(model, [CHAT] * 4)
    assert job.lines[-1].startswith("samples end with '<|im_end|>': the result's generation_config")
    assert job.spec.train.end_token_ids == (IM_END,)
    out = job.export(tmp_path / "out")
    assert eos_of(out) == [*(own if isinstance(own, list) else [END]), IM_END]
    saved = json.loads((out / "generation_config.json").read_text())
    assert saved.get("temperature") == (None if own is None else 0.7)
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == eos_of(out)


def test_of_a_model_that_stops_there_the_file_is_a_copy(tmp_path: Path) -> None:
    model = save(tmp_path / "model", tokenizer())
    text = json.dumps({"eos_token_id": [IM_END, END]})
    (model / "generation_config.json").write_text(text)
    job = trained(model, [CHAT] * 4)
    assert job.spec.train.end_token_ids == ()
    assert (job.export(tmp_path / "out") / "generation_config.json").read_text() == text


def test_text_teaches_no_end_of_a_turn(tmp_path: Path) -> None:
    model = save(tmp_path / "model", tokenizer())
    job = trained(model, [{"text": "cats " * 20}] * 4)
    assert job.spec.train.end_token_ids == ()
    assert eos_of(job.export(tmp_path / "out")) == END


def test_documents_that_end_by_the_tokenizers_end_teach_it(tmp_path: Path) -> None:
    model = save(tmp_path / "model", tokenizer(None, eos="</s>"))
    rows = [{"prompt": "2+2=", "completion": "4"}] * 8
    job = trained(model, rows)
    assert job.spec.train.end_token_ids == (EOS,)
    assert eos_of(job.export(tmp_path / "out")) == [END, EOS]


def test_an_adapter_says_where_to_stop(tmp_path: Path) -> None:
    model = save(tmp_path / "model", tokenizer())
    job = trained(model, [CHAT] * 4, adapter=Adapter.LORA)
    assert job.lines[-1].endswith(
        f"pass eos_token_id=[{IM_END}] to generate, together with its own"
    )
    assert not (job.export(tmp_path / "out") / "generation_config.json").exists()


def test_settings_that_nobody_can_read_are_refused_before_a_run(tmp_path: Path) -> None:
    model = save(tmp_path / "model", tokenizer())
    (model / "generation_config.json").write_text("{")
    with pytest.raises(BadModel, match=r"generation_config\.json is unreadable"):
        trained(model, [CHAT] * 4)
