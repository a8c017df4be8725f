"""Jobs in YAML, in axolotl's words and in our own."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

from swarm_ft.api.job_file import MAX_FILE_BYTES, job_yaml, read_job_file
from swarm_ft.api.translation import job_fields, translate_job
from swarm_ft.client.options import DataFormat, JobOptions, Truncation
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import build, by_names
from swarm_ft.protocol.spec.run_spec import (
    Adapter,
    EvalStrategy,
    LrSchedule,
    Optim,
    SaveStrategy,
)
from tests.draws import draws

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
    assert (job.model, *job.datasets, job.split) == ("./qwen", "chats.jsonl", "train")
    assert (job.evaluation.eval_dataset, job.epochs) == ("others.jsonl", 2)
    assert (job.reading.packing, job.reading.assistant_only_loss) == (False, True)
    assert job.outputs.out == Path("tuned")
    train = job.train
    assert (train.seq_length, train.micro_batch_size, train.batch_size) == (64, 2, 8)
    assert (train.learning_rate, train.lr_schedule) == (2e-4, LrSchedule.CONSTANT)
    assert (train.optim, train.clip_grad_norm) == (Optim.ADAMW, 0.5)
    assert (train.adapter, train.load_in_4bit, train.lora_r) == (Adapter.LORA, True, 8)
    assert (train.lora_alpha, train.lora_dropout, train.dropout) == (16, 0.1, True)
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
    "learning_rat: 1": "learning_rat: no such key; did you mean 'learning_rate'?",
    "base_modle: a": "did you mean 'base_model'?",
    "model: b": "expected one model, got 'a' too",
    "deepspeed: zero3.json": "deepspeed: the swarm partitions the model itself",
    "label_smoothing_factor: 0.1": "label_smoothing_factor: the loss has no label smoothing",
    "max_seq_length: 8\nsequence_len: 16": "sequence_len: expected one seq_length, got 8 too",
    "push_to_hub: true": "push_to_hub: expected a repository, as [OWNER/]NAME, got True",
    "num_train_epoch: 3": "did you mean 'num_train_epochs'?",
    "val_set_size: 1.5": "expected a share below 1 or a whole number of documents",
    "val_set_size: 0.1\ntest_datasets: [{path: b}]": "expected it without --eval-dataset",
    "warmup_ratio: 0.1\nwarmup_steps: 5": "expected it or --warmup-steps, got both",
    "evals_per_epoch: 2\neval_steps: 5": "expected it or --eval-steps, got both",
    "saves_per_epoch: 2\nsave_strategy: epoch": "expected --save-strategy steps beside it",
    "lr_scheduler: constant\nwarmup_steps: 5": "constant has no warmup",
    "lora_target_linear: true\nlora_target_modules: [lm_head]": "expected linear layers of",
    "train_on_inputs: false": "train_on_inputs: expected type: chat_template or alpaca",
    "train_on_inputs: 3": "train_on_inputs: expected true or false, got 3",
    "chat_template: chatml": "chat_template: the swarm uses the model's own chat template",
    "special_tokens: {eos_token: <e>}": "eos_token: the swarm uses the model's own tokenizer",
    "special_tokens: <e>": "special_tokens: the swarm uses the model's own tokenizer",
    "plugins: [axolotl.integrations.kd.KDPlugin]": "plugins: expected no plugins, got",
    "model_type: AutoModelForSequenceClassification": "task: classification",
    "adam_beta2: 0.95": "adam_beta2: expected 0.999, got 0.95",
    "rl: dpo": "rl: the swarm does not train on preferences or rewards",
    "labels: [no, yes]": "labels: expected text, got [False, True]; YAML reads yes, no",
    "optimizer: lion": "optimizer: expected adamw, adafactor, sgd or adamw-8bit, got 'lion'",
    "num_epochs: 1.5": "num_epochs: expected a whole number, got 1.5",
    "separator: [[a]]": "separator: expected one value, got [['a']]",
    "seq-length: 8\nseq_length: 8": "seq_length: expected it once, got seq_length too",
    "datasets: [{path: a, type: alpaca}]\ntest_datasets: [{path: b, type: completion}]": (
        "test_datasets: type: expected the same type of all datasets"
    ),
    "datasets: [{path: a}, {split: train}]": "datasets: path: expected a path in each entry",
    "datasets: [{path: a, split: x}, {path: b, split: y}]": "expected one split, got 'x' too",
    "datasets: [{path: a}]\ntest_datasets: [{path: a}, {path: b}]": "expected a list of one",
    "datasets: [{path: a, typo: b}]": "datasets: typo: no such key",
    "datasets: [{path: a, type: sharegpt}]": "expected one of completion, chat_template",
    "gradient_accumulation_steps: many": "expected a whole number, got 'many'",
    "gradient_accumulation_steps: 2\nbatch_size: 5": "expected one batch_size, got 5 too",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_meant_here_is_refused_with_words(text: str, tmp_path: Path) -> None:
    data = "" if "datasets: [" in text else "dataset: b\n"
    with pytest.raises(BadOption) as refused:
        job_of(f"base_model: a\n{data}{text}\n", tmp_path)
    assert REFUSED[text] in refused.value.message
    is_of_options = refused.value.message.startswith("--")
    assert is_of_options or str(tmp_path) in refused.value.message


UNREADABLE = {
    "": "expected keys and values",
    "- a\n": "expected keys and values",
    "1: a\n": "expected keys and values",
    "a: [": "expected YAML",
    "a: !!python/object/apply:os.system ['true']": "expected YAML",
    "a: " + "b" * MAX_FILE_BYTES: "expected at most",
}


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_is_no_job_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=UNREADABLE[text]):
        job_of(text, tmp_path)
    with pytest.raises(BadOption, match="No such file"):
        read_job_file(tmp_path / "none.yaml")


@settings(
    max_examples=draws(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": st.floats(0, 1),
            "epochs": st.integers(1, 9),
            "steps": st.integers(1, 9),
            "adapter": st.sampled_from(("none", "lora", "dora")),
            "eval_strategy": st.sampled_from(("no", "steps", "epoch")),
            "column": st.sampled_from(((), ("prompt=q", "completion=A: {a}"))),
            "truncation": st.sampled_from(("cut", "split")),
            "eval_size": st.sampled_from((0.0, 0.1, 7)),
            "warmup_ratio": st.sampled_from((0.0, 0.5)),
            "warmup_steps": st.sampled_from((0, 3)),
            "lr_schedule": st.sampled_from(("constant", "cosine")),
            "evals_per_epoch": st.integers(0, 2),
            "saves_per_epoch": st.integers(0, 2),
            "lora_dropout": st.sampled_from((0.0, 0.1)),
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
@example({"eval_dataset": "a\x85b\u2028", "separator": "\u2029"})
def test_a_job_that_is_shown_is_the_same_job_again(values: dict[str, object]) -> None:
    try:
        options = build(
            JobOptions, by_names(JobOptions, {"model": "no", "dataset": "1e3", **values})
        )
    except BadOption:
        reject()  # they contradict each other
    read = job_fields(yaml.safe_load(job_yaml(options)))
    assert build(JobOptions, by_names(JobOptions, read)) == options


def test_several_datasets_are_a_mixture(tmp_path: Path) -> None:
    text = "base_model: a\ndatasets: [{path: b, split: x}, {path: c}]\nprobabilities: [0.75, 0.25]"
    job = job_of(text, tmp_path)
    assert (job.datasets, job.split, job.shares) == (("b", "c"), "x", (0.75, 0.25))
    assert job_of(job_yaml(job), tmp_path) == job


# ---- all of a file at once

LORA_1B = """
base_model: ./llama
datasets: [{path: rows.jsonl, type: alpaca}]
val_set_size: 0.1
adapter: lora
lora_model_dir:
sequence_len: 64
sample_packing: true
eval_sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.0
lora_target_modules: [q_proj, v_proj]
wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""
"""The keys of axolotl's examples/llama-3/lora-1b.yml, but for its loss watchdog."""
WATCHDOG = "loss_watchdog_threshold: 5.0\nloss_watchdog_patience: 3\n"


def test_the_keys_of_an_example_of_axolotl(tmp_path: Path) -> None:
    job = job_of(LORA_1B, tmp_path)
    assert (job.evaluation.eval_size, job.warmup_ratio, job.evals_per_epoch) == (0.1, 0.1, 4)
    assert (job.train.optim, job.train.save_strategy) == (Optim.ADAMW_8BIT, SaveStrategy.EPOCH)
    assert (job.train.batch_size, job.train.dropout, job.reading.packing) == (4, False, True)
    spec = job.train_spec(num_samples=100)
    assert (spec.num_steps, spec.warmup_steps, spec.eval_steps) == (25, 3, 7)


def test_keys_without_effect_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(LORA_1B)
    (unused, others) = translate_job(read_job_file(path), path).notes
    assert unused.startswith(
        "eval_sample_packing, logging_steps, attn_implementation, special_tokens: pad_token: "
    )
    assert others == (
        "not set, and with a default that differs from axolotl's: excess_length_strategy (drop "
        "there, cut; split for plain text and --packing-strategy wrapped here), shuffle (true "
        "there, no-shuffle here)"
    )


def test_precision_is_each_machines_own(tmp_path: Path) -> None:
    # axolotl-ai-cloud/axolotl examples have bf16: true as often as bf16: auto
    path = tmp_path / "job.yaml"
    path.write_text("model: a\ndataset: b\nbf16: true\nfp16: false\ntf32: true\n")
    job = translate_job(read_job_file(path), path)
    assert dict(job.fields) == {"model": "a", "dataset": "b"}
    assert len(job.notes) == 2
    assert job.notes[0].startswith("tf32: no effect on the result here")
    assert job.notes[1].startswith("bf16: no effect here; weights train in float32")
    assert "(serve-stage --dtype); base_dtype: bfloat16 halves" in job.notes[1]


def test_a_job_may_have_the_names_of_a_trainer(tmp_path: Path) -> None:
    job = job_of(
        "model: a\ndataset: b\nnum_train_epochs: 2.0\nper_device_train_batch_size: 4\n"
        "gradient_accumulation_steps: 2\nlr_scheduler_type: cosine\nmax_length: 64\n"
        "max_steps: -1\nadam_epsilon: 1e-8\ntrain_sampling_strategy: random\n"
        "push_to_hub: false\nreport_to: []\n"
        "packing: true\npacking_strategy: bfd_split\nmetric_for_best_model: eval_loss\n",
        tmp_path,
    )
    train = job.train
    assert (job.epochs, job.steps, train.batch_size, train.micro_batch_size) == (2, None, 8, 4)
    assert (train.lr_schedule, train.seq_length, train.shuffle) == (LrSchedule.COSINE, 64, True)
    assert job.reading.truncation is Truncation.SPLIT
    assert train.metric_for_best_model == "loss"
    assert (job.outputs.push_to_hub, job.outputs.report_to) == (None, "none")


def test_all_keys_that_cannot_be_used_are_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(BadOption) as refused:
        job_of(f"{LORA_1B}{WATCHDOG}learning_rat: 1\nnum_epoch: many\nrl: dpo\n", tmp_path)
    message = refused.value.message
    assert (
        f"{tmp_path / 'job.yaml'}: 5 keys cannot be used: (1) loss_watchdog_threshold:" in message
    )
    for words in ("(2) loss_watchdog_patience: ", "'learning_rate'?; ", "'num_epochs'?; (5) rl: "):
        assert words in message


def test_a_key_cannot_steer_the_terminal_that_shows_it(tmp_path: Path) -> None:
    with pytest.raises(BadOption) as refused:
        job_of('base_model: a\n"bad\\e[31m": 1\nrl: "\\e[2J"\nadam_beta1: "\\e[2J"\n', tmp_path)
    assert refused.value.message.isprintable()


TWICE = {
    "num_epochs: 1\nseed: 3\nnum_epochs: 3\n": (
        "line 3: expected num_epochs once, got it on line 1 too"
    ),
    "datasets:\n  - path: a\n    path: b\n": "line 3: expected path once, got it on line 2 too",
    "{seed: 1, seed: 1}": "line 1: expected seed once, got it on line 1 too",
}
"""Of snowflakedb/ArcticTraining#85 and yaml/pyyaml#165: pyyaml takes the last one."""


@pytest.mark.parametrize("text", TWICE)
def test_a_key_that_is_given_twice_is_refused_with_its_lines(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(BadOption) as refused:
        read_job_file(path)
    assert refused.value.message == f"{path}: {TWICE[text]}"


def test_a_merged_mapping_may_have_keys_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("base_model: a\ndatasets:\n  - &one {path: b, split: x}\n")
    more = "test_datasets:\n  - <<: *one\n    split: y\n"
    job = job_of(f"{path.read_text()}{more}", tmp_path)
    assert (job.split, job.evaluation.eval_split, job.evaluation.eval_dataset) == ("x", "y", "b")


@pytest.mark.parametrize(
    ("keys", "completion_only", "assistant_only"),
    [
        ("type: chat_template", True, True),
        ("type: chat_template\ntrain_on_inputs: false", True, True),
        ("type: chat_template\ntrain_on_inputs: true", True, False),
        ("type: chat_template\n    roles_to_train: [assistant]", True, True),
        ("type: chat_template\n    roles_to_train: [gpt]\n    train_on_eos: turn", True, True),
        ("type: chat_template\n    chat_template: tokenizer_default", True, True),
        (
            "type: chat_template\n    field_messages: conversations\n"
            "    message_property_mappings: {role: from, content: value}",
            True,
            True,
        ),
        ("type: alpaca", True, False),
        ("type: alpaca\ntrain_on_inputs: false", True, False),
        ("type: alpaca\ntrain_on_inputs: true", False, False),
        ("type: completion\ntrain_on_inputs: false", True, False),
        ("split: train", True, False),
    ],
)
def test_what_is_learned_follows_from_the_type(
    keys: str, completion_only: bool, assistant_only: bool, tmp_path: Path
) -> None:
    # axolotl-ai-cloud/axolotl#2089, #1761, #3098: of chats the assistant's part alone
    job = job_of(f"base_model: a\ndatasets:\n  - path: b\n    {keys}\n", tmp_path)
    reading = job.reading
    assert (reading.completion_only_loss, reading.assistant_only_loss) == (
        completion_only,
        assistant_only,
    )


ENTRIES = {
    "roles_to_train: [user, assistant]": "datasets: roles_to_train: expected [assistant]",
    "roles_to_train: []": "datasets: roles_to_train: expected [assistant], got []",
    "train_on_eos: all": "datasets: train_on_eos: expected turn, got 'all'",
    "chat_template: llama3": "chat_template: the swarm uses the model's own chat template",
    "field_messages: 3": "datasets: field_messages: expected a column, got 3",
    "message_property_mappings: {role: who, content: what}": "expected role: role and content",
    "message_field_training_detail: d": "the loss covers whole messages only",
    "roles: {user: [me]}": "datasets: roles: the template gets roles",
    "field_mesages: a": "no such key; did you mean 'field_messages'?",
}


@pytest.mark.parametrize("text", ENTRIES)
def test_keys_of_a_dataset_mean_what_they_say_or_are_refused(text: str, tmp_path: Path) -> None:
    start = "base_model: a\ndatasets:\n  - path: b\n    type: chat_template\n"
    with pytest.raises(BadOption) as refused:
        job_of(f"{start}    {text}\n", tmp_path)
    assert ENTRIES[text] in refused.value.message


def test_columns_have_the_roles_of_their_type(tmp_path: Path) -> None:
    start = "base_model: a\ndatasets:\n  - path: b\n    type: "
    chats = "chat_template\n    field_messages: dialog\n    field_tools: functions\n"
    assert job_of(f"{start}{chats}", tmp_path).reading.column == (
        "messages=dialog",
        "tools=functions",
    )
    # whatever other columns there are, such as 'text' in tatsu-lab/alpaca or 'messages'
    columns = ("instruction=instruction", "output=output")
    assert job_of(f"{start}alpaca\n", tmp_path).reading.column == columns
    with pytest.raises(BadOption, match="column: expected one column, got"):
        job_of(f"{start}alpaca\ncolumn: [output=answer]\n", tmp_path)
    two = "  - path: c\n    type: chat_template\n"
    with pytest.raises(BadOption, match="datasets: expected the same columns of all datasets"):
        job_of(f"{start}{chats}{two}", tmp_path)
    assert job_of(f"{start}chat_template\n{two}", tmp_path).datasets == ("b", "c")
    mapped = job_of("base_model: a\ndataset: b\ncolumn: {prompt: q, completion: a}\n", tmp_path)
    assert mapped.reading.column == ("prompt=q", "completion=a")


def test_long_rows_of_text_go_on_in_the_next_sample(tmp_path: Path) -> None:
    start = "base_model: a\ndatasets:\n  - path: b.jsonl\n    type: "
    assert job_of(f"{start}completion\n", tmp_path).reading.truncation is Truncation.SPLIT
    assert job_of(f"{start}alpaca\n", tmp_path).reading.truncation is None
    truncated = job_of(f"{start}alpaca\nexcess_length_strategy: truncate\n", tmp_path)
    assert truncated.reading.truncation is Truncation.CUT
    dropped = job_of(f"{start}alpaca\nexcess_length_strategy: drop\n", tmp_path)
    assert dropped.reading.truncation is Truncation.DROP


def test_rows_of_text_are_of_one_column_or_of_lines(tmp_path: Path) -> None:
    start = "base_model: a\ndatasets:\n  - type: completion\n"
    rows = job_of(f"{start}    path: b.jsonl\n", tmp_path).reading
    assert (rows.text_column, rows.data_format) == ("text", None)
    named = job_of(f"{start}    path: b.jsonl\n    field: chapter\n", tmp_path).reading
    assert named.text_column == "chapter"
    lines = job_of(f"{start}    path: b.txt\n", tmp_path).reading
    assert (lines.text_column, lines.data_format) == (None, DataFormat.LINES)


def test_shares_and_words_of_transformers(tmp_path: Path) -> None:
    start = "base_model: a\ndataset: b\n"
    job = job_of(f"{start}warmup_steps: 0.1\nlora_target_linear: true\n", tmp_path)
    assert (job.warmup_ratio, job.train.target_modules) == (0.1, "all-linear")
    job = job_of(
        f"{start}evals_per_epoch: 1\nload_best_model_at_end: true\nsaves_per_epoch: 1\n", tmp_path
    )
    assert job.train.eval_strategy is EvalStrategy.EPOCH
    job = job_of(f"{start}curriculum_sampling: false\nuse_tensorboard: true\n", tmp_path)
    assert (job.train.shuffle, job.outputs.report_to) == (True, "tensorboard")
