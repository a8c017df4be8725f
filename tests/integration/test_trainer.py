"""`SwarmTrainer`, for those who come from TRL, and `LocalPipeline`, for loops of one's own."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_ft import LocalPipeline, LocalSwarm, SwarmConfig, SwarmTrainer
from swarm_ft.client.demo_input import DemoInput, write_demo_input
from swarm_ft.errors import BadOption, BadSnapshot, MalformedMessage, OutOfTurn

TEXTS = ["def one(): return 1\n" * 12, "def two(): return 2\n" * 12]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> DemoInput:
    return write_demo_input(tmp_path_factory.mktemp("sample"), seed=1, num_layers=4, hidden_size=32)


def config(out: Path, **more: Any) -> SwarmConfig:
    return SwarmConfig(
        output_dir=out,
        max_length=32,
        max_steps=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        **more,
    )


def of_trl(**arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.sft_config import SFTConfig

        return SFTConfig(bf16=False, report_to="none", **arguments)


def test_a_script_of_trl_needs_another_trainer_alone(sample: DemoInput, tmp_path: Path) -> None:
    theirs = of_trl(output_dir=str(tmp_path / "tuned"), max_length=32, max_steps=2)
    with LocalSwarm(stages=2) as swarm:
        trainer = SwarmTrainer(sample.model_dir, theirs, TEXTS, swarm=swarm)
        assert trainer.train().global_step == 2
    assert (tmp_path / "tuned" / "config.json").exists()


def test_what_a_configuration_of_trl_asks_for_in_vain_is_named(
    sample: DemoInput, tmp_path: Path
) -> None:
    theirs = of_trl(output_dir=str(tmp_path), neftune_noise_alpha=5.0, label_smoothing_factor=0.1)
    with pytest.raises(BadOption) as refused:
        SwarmTrainer(sample.model_dir, theirs, TEXTS)
    for name in ("neftune_noise_alpha", "label_smoothing_factor"):
        assert name in refused.value.message


def test_a_datasets_rows_train_an_adapter_that_peft_loads(
    sample: DemoInput, tmp_path: Path
) -> None:
    with LocalSwarm(stages=2) as swarm:
        trainer = SwarmTrainer(
            sample.model_dir,
            config(tmp_path / "tuned", report_to=["csv"]),
            Dataset.from_dict({"text": TEXTS}),
            [{"text": TEXTS[0]}],
            LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"]),
            swarm=swarm,
        )
        output = trainer.train()
    assert output.global_step == 3
    assert output.metrics["eval_loss"] < trainer.log_history[0]["eval_loss"]
    assert [one["step"] for one in trainer.log_history if "loss" in one] == [1, 2, 3]
    assert output.training_loss == pytest.approx(
        sum(one["loss"] for one in trainer.log_history if "loss" in one) / 3
    )
    assert trainer.evaluate().keys() == {"eval_loss", "eval_perplexity"}
    assert trainer.evaluate()["eval_loss"] == output.metrics["eval_loss"]
    state = trainer.state
    assert (state.global_step, state.max_steps, state.best_global_step) == (3, 3, 3)
    assert state.best_metric == output.metrics["eval_loss"]
    trainer.save_model()
    trainer.save_model(tmp_path / "copy")
    copied = {path.name for path in (tmp_path / "copy").iterdir()}
    assert copied == {path.name for path in (tmp_path / "tuned").iterdir()}
    base = AutoModelForCausalLM.from_pretrained(sample.model_dir)
    tuned = PeftModel.from_pretrained(base, tmp_path / "tuned")
    assert tuned.peft_config["default"].r == 4
    card = (tmp_path / "tuned" / "README.md").read_text()
    assert "library_name: peft" in card
    assert "| steps | 3 of 8 samples |" in card
    (metrics,) = tmp_path.glob("tuned-runs/*/metrics.csv")
    assert metrics.read_text().count("\n") == 1 + 3 + 2


async def test_a_model_that_is_there_trains_in_a_swarm_that_is_started_for_it(
    sample: DemoInput, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(sample.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(sample.model_dir)
    more: Any = {"swarm": {"forward_codec": "none", "backward_codec": "none"}}
    trainer = SwarmTrainer(
        model, config(tmp_path / "tuned", **more), TEXTS, processing_class=tokenizer
    )
    output = await trainer.train_async()
    assert trainer.report is not None
    assert trainer.report.losses[-1] < trainer.report.losses[0]
    assert output.metrics["train_runtime"] > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "args": ({"args": {"max_steps": 3}}, "args: expected a SwarmConfig, a TrainingArguments"),
    "no data": ({"train_dataset": None}, "train_dataset: expected data"),
    "bias": (
        {"peft_config": LoraConfig(bias="all")},
        "expected no bias, which a swarm does not support, got 'all'",
    ),
    "rslora": (
        {"peft_config": LoraConfig(use_rslora=True)},
        "expected no use_rslora, which a swarm does not support, got True",
    ),
    "pattern": (
        {"peft_config": LoraConfig(target_modules=".*q")},
        "a list of ends of names, got the pattern '.*q'",
    ),
    "no peft": ({"peft_config": {"r": 8}}, "peft_config: expected a LoraConfig, got dict"),
    "model": ({"model": 3}, "model: expected a directory, a hub id or a model, got int"),
    "epochs": (
        {"args": SwarmConfig(num_train_epochs=0.5)},
        "num_train_epochs: expected a whole number, got 0.5",
    ),
    "callbacks": ({"callbacks": [print]}, "callbacks: use log_history, report_to, or on_event"),
    "metrics": ({"compute_metrics": print}, "it has no compute_metrics"),
    "tokenizer": ({"tokenizer": "gpt2"}, "tokenizer: its present name is processing_class"),
    "of args": ({"learning_rate": 1e-4}, "expected it in args, as SwarmConfig(learning_rate=...)"),
    "typo": ({"evl_dataset": TEXTS}, "did you mean 'eval_dataset'?"),
    "label smoothing": (
        {"args": SwarmConfig(label_smoothing_factor=0.1)},
        "SwarmConfig: label_smoothing_factor: the loss has no label smoothing",
    ),
    "bounds": ({"args": SwarmConfig(learning_rate=-1.0)}, "learning_rate: expected a finite"),
    "beside": (
        {"args": SwarmConfig(packing_strategy="wrapped")},
        "packing_strategy: expected packing beside it",
    ),
    "own options": ({"args": SwarmConfig(swarm={"epochs": 0})}, "epochs: expected 1 to"),
    "ways": ({"invite": "swarm1", "swarm": LocalSwarm()}, "expected one of the two, got both"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_swarm_does_not_do_is_refused(name: str) -> None:
    arguments, words = REFUSED[name]
    with pytest.raises(BadOption) as refused:
        SwarmTrainer(**{"model": "gpt2", "train_dataset": TEXTS, **arguments})
    assert words in refused.value.message


def test_arguments_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    args = SwarmConfig(bf16=True, logging_steps=10, dataloader_num_workers=4)
    SwarmTrainer("gpt2", args, TEXTS, data_collator=None)
    plain, precision = caplog.messages
    assert plain.startswith("SwarmConfig: logging_steps, dataloader_num_workers: no effect")
    assert precision.startswith("SwarmConfig: bf16: no effect here; weights train in float32")


def test_methods_of_a_trainer_say_when_they_are_early(tmp_path: Path) -> None:
    trainer = SwarmTrainer("gpt2", config(tmp_path / "tuned"), TEXTS)
    for method in (trainer.save_model, trainer.evaluate):
        with pytest.raises(OutOfTurn, match=r"call train\(\) first"):
            method()
    with pytest.raises(BadOption, match="pass it to SwarmTrainer"):
        trainer.evaluate(TEXTS)
    with pytest.raises(BadOption, match="resume_from_checkpoint: expected invite beside it"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(BadOption, match="resume_from_checkpoint: expected True or False"):
        trainer.train("checkpoint-500")  # type: ignore[arg-type]
    assert trainer.state.global_step == 0
    assert trainer.state.best_metric is None


def test_models_and_tokenizers_that_nobody_could_read_are_refused(sample: DemoInput) -> None:
    model = AutoModelForCausalLM.from_pretrained(sample.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(sample.model_dir)
    with pytest.raises(
        BadOption, match="processing_class: expected the tokenizer of the model, got None"
    ):
        SwarmTrainer(model, None, TEXTS)
    with pytest.raises(BadOption, match="peers fetch models by name"):
        SwarmTrainer(model, None, TEXTS, processing_class=tokenizer, invite="swarm1")
    with pytest.raises(BadOption, match="expected the tokenizer of 'gpt2'"):
        SwarmTrainer("gpt2", None, TEXTS, processing_class=tokenizer)


# ---- a loop of one's own

EXACT: dict[str, Any] = {"forward_codec": "none", "backward_codec": "none", "seq_length": 16}


def batches() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(0, 90, (2, 16), generator=drawn) for _ in range(3)]


def test_stages_under_ones_own_loop_learn_what_the_whole_model_learns(
    sample: DemoInput,
) -> None:
    losses = {}
    for stages in (1, 3):
        pipeline = LocalPipeline(sample.model_dir, stages=stages, device="cpu", **EXACT)
        losses[stages] = [
            (pipeline.forward_backward(batch), pipeline.optim_step(1e-2)) for batch in batches()
        ]
    model = AutoModelForCausalLM.from_pretrained(sample.model_dir)
    expected = model(input_ids=batches()[0], labels=batches()[0]).loss.item()
    assert losses[3][0][0] == pytest.approx(expected, rel=1e-5)
    for one, three in zip(losses[1], losses[3], strict=True):
        assert three == pytest.approx(one, rel=1e-4)


def test_a_step_of_many_batches_is_that_of_one(sample: DemoInput) -> None:
    whole = torch.cat(batches())
    labels = whole.clone()
    labels[2, :12] = -100  # of one batch fewer are learned
    norms = []
    for parts in (1, 3):
        pipeline = LocalPipeline(sample.model_dir, stages=2, device="cpu", **EXACT)
        for tokens, targets in zip(whole.chunk(parts), labels.chunk(parts), strict=True):
            pipeline.forward_backward(tokens, targets)
        norms.append(pipeline.optim_step(1e-2))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_state_goes_on_where_it_was_saved(sample: DemoInput, tmp_path: Path) -> None:
    options: dict[str, Any] = {"forward_codec": "q8", "backward_codec": "q8", "seq_length": 16}
    pipeline = LocalPipeline(sample.model_dir, device="cpu", **options)
    first, second, third = batches()

    def run(batch: Tensor) -> tuple[float, float]:
        return pipeline.forward_backward(batch), pipeline.optim_step(1e-2)

    run(first)
    pipeline.save_state(tmp_path / "state")
    expected = [run(second), run(third)]
    pipeline.forward_backward(first)
    with pytest.raises(OutOfTurn, match="expected no batches in the present step"):
        pipeline.save_state(tmp_path / "other")
    pipeline.load_state(tmp_path / "state")
    assert pipeline.steps == 1
    assert [run(second), run(third)] == expected
    pipeline.save_model(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.n_layer == 4
    other = LocalPipeline(sample.model_dir, stages=4, device="cpu", **options)
    with pytest.raises(BadSnapshot, match="options and stages, got another state"):
        other.load_state(tmp_path / "state")
    (tmp_path / "state").write_bytes(b"none")
    with pytest.raises(BadSnapshot, match="expected a saved state"):
        pipeline.load_state(tmp_path / "state")


def test_changes_are_sent_of_samples_that_come_again(sample: DemoInput) -> None:
    pipeline = LocalPipeline(sample.model_dir, device="cpu", seq_length=16)
    (batch, *_) = batches()
    # The default codecs by the names that a caller knows, not by the settings that they stand for.
    words = (
        r"forward_backward: pass sample_ids=\[\.\.\.\], a number for each of the 2 samples "
        r"\(aq3\+z remembers each sample\); or forward_codec='q8', which needs none"
    )
    with pytest.raises(BadOption, match=words):
        pipeline.forward_backward(batch)
    with pytest.raises(BadOption, match="seq_length: expected 2 to"):
        LocalPipeline(sample.model_dir, seq_length=1)
    with pytest.raises(OutOfTurn, match="expected a forward_backward before it"):
        pipeline.optim_step()
    losses = []
    for _ in range(5):
        losses.append(pipeline.forward_backward(batch, sample_ids=[0, 1]))
        pipeline.optim_step(1e-2)
    assert losses[-1] < losses[0]
    (boundary,) = pipeline.boundaries
    assert 0 < boundary.sent_bytes < boundary.uncompressed_bytes / 4
    with pytest.raises(MalformedMessage, match="1 target or more"):
        pipeline.forward_backward(batch, torch.full_like(batch, -100), sample_ids=[0, 1])
