"""Jobs in YAML, in axolotl's words and in our own."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from swarm_ft.api.job_file import MAX_FILE_BYTES, job_fields, job_yaml, read_job_file
from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import build, by_names
from swarm_ft.protocol.spec.run_spec import Adapter, EvalStrategy, LrSchedule, Optim

AXOLOTL = """
base_model: ./qwen
datasets:
  - path: chats.jsonl
    type: chat_template
    split: train
test_datasets:
  - path: others.jsonl
sequence_len: 64
sample_packing: false
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
learning_rate: 2e-4
lr_scheduler: constant_with_warmup
warmup_steps: 10
optimizer: adamw_torch
max_grad_norm: 0.5
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.1
lora_target_modules: [q_proj, v_proj]
train_on_inputs: false
bf16: auto
flash_attention:
eval_strategy: no
output_dir: ./tuned
"""


def job_of(text: str, tmp_path: Path) -> JobOptions:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return build(JobOptions, by_names(JobOptions, job_fields(read_job_file(path), path)))


def test_what_axolotl_says_is_what_is_meant_here(tmp_path: Path) -> None:
    job = job_of(AXOLOTL, tmp_path)
    assert (job.model, job.dataset, job.split) == ("./qwen", "chats.jsonl", "train")
    assert (job.evaluation.eval_dataset, job.epochs) == ("others.jsonl", 2)
    assert (job.reading.packing, job.reading.completion_only_loss) == (False, True)
    assert job.outputs.out == Path("tuned")
    train = job.train
    assert (train.seq_length, train.micro_batch_size, train.batch_size) == (64, 2, 8)
    assert (train.learning_rate, train.lr_schedule) == (2e-4, LrSchedule.CONSTANT)
    assert (train.optim, train.clip_grad_norm) == (Optim.ADAMW, 0.5)
    assert (train.adapter, train.load_in_4bit, train.lora_r) == (Adapter.LORA, True, 8)
    assert (train.lora_alpha, train.lora_dropout) == (16, 0.1)
    assert train.target_modules == "q_proj,v_proj"
    assert train.eval_strategy is EvalStrategy.NO


def test_our_own_names_are_taken_with_dashes_too(tmp_path: Path) -> None:
    job = job_of("model: a\ndataset: b\nfw: aq2\nreplica-codec: q4\ntask: causal-lm\n", tmp_path)
    assert (job.train.forward_codec, job.train.dp_codec) == ("aq2", "q4")


DORA = ("adapter: lora\npeft_use_dora: true\n", "peft_use_dora: true\nadapter: lora\n")


@pytest.mark.parametrize("text", DORA)
def test_dora_is_an_adapter_whatever_comes_first(text: str, tmp_path: Path) -> None:
    assert job_of(f"base_model: a\ndataset: b\n{text}", tmp_path).train.adapter is Adapter.DORA


REFUSED = {
    "learning_rat: 1": "learning_rat: there is no such key; did you mean 'learning_rate'?",
    "base_modle: a": "did you mean 'base_model'?",
    "model: b": "model is given twice, as 'a' too",
    "bf16: true": "bf16: each volunteer decides that",
    "val_set_size: 0.1": "val_set_size: name held-out data",
    "datasets: [{path: a}, {path: b}]": "datasets: expected a list of one",
    "datasets: [{path: a, typo: b}]": "datasets: typo: there is no such key",
    "datasets: [{path: a, type: sharegpt}]": "expected one of completion, chat_template",
    "gradient_accumulation_steps: many": "expected a whole number, got 'many'",
    "gradient_accumulation_steps: 2\nbatch_size: 5": "batch_size is given twice, as 5 too",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_meant_here_is_refused_with_words(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption) as refused:
        job_of(f"base_model: a\n{text}\n", tmp_path)
    assert REFUSED[text] in refused.value.message
    assert str(tmp_path) in refused.value.message


UNREADABLE = {
    "": "expected keys and values",
    "- a\n": "expected keys and values",
    "1: a\n": "expected keys and values",
    "a: [": "not YAML",
    "a: !!python/object/apply:os.system ['true']": "not YAML",
    "a: " + "b" * MAX_FILE_BYTES: "expected at most",
}


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_is_no_job_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=UNREADABLE[text]):
        job_of(text, tmp_path)
    with pytest.raises(BadOption, match="No such file"):
        read_job_file(tmp_path / "none.yaml")


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": st.floats(0, 1),
            "epochs": st.integers(1, 9),
            "steps": st.integers(1, 9),
            "adapter": st.sampled_from(("none", "lora", "dora")),
            "eval_strategy": st.sampled_from(("no", "steps", "epoch")),
            "eval_compression": st.sampled_from(("off", "on", "both")),
            "eval_dataset": st.text(min_size=1, max_size=9),
            "eval_split": st.sampled_from(("test", "no")),
            "sync_tied_embeddings": st.booleans(),
            "shuffle": st.booleans(),
            "buffer_bits": st.sampled_from((4, 8, 16)),
            "forward_codec": st.sampled_from(("none", "aq2", "q8")),
            "out": st.sampled_from((Path("a"), Path("b/c"))),
            "separator": st.text(max_size=3),
        },
    )
)
def test_a_job_that_is_shown_is_the_same_job_again(values: dict[str, object]) -> None:
    try:
        asked = build(JobOptions, by_names(JobOptions, {"model": "no", "dataset": "1e3", **values}))
    except BadOption:
        reject()  # they contradict each other
    read = job_fields(yaml.safe_load(job_yaml(asked)))
    assert build(JobOptions, by_names(JobOptions, read)) == asked
