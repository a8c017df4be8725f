"""Training by the names of transformers' Trainer and TRL's SFTTrainer, in a swarm.

What a swarm does not do is refused with words, and nothing is quietly left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from swarm_ft.api.client_calls import train_async
from swarm_ft.api.keywords import JobKeywords
from swarm_ft.api.local_swarm import LocalSwarm
from swarm_ft.api.loop import awaited, waited
from swarm_ft.client.report import RunReport
from swarm_ft.client.reporting import numbers_of
from swarm_ft.errors import BadOption
from swarm_ft.protocol.messages.client import RunEvent

ALL_LINEAR = "all-linear"
_PEFT_TAKEN = {"r", "lora_alpha", "lora_dropout", "target_modules", "use_dora"}
_PEFT_SAYS_NOTHING = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "runtime_config",
}


@dataclass(kw_only=True)
class SwarmConfig:
    """Arguments by the names of `TrainingArguments` and `SFTConfig`.

    Attributes:
        per_device_train_batch_size: samples that travel together; no effect on the result.
        gradient_accumulation_steps: of these, that a step has.
        max_length: tokens of a sample at most; a longer document is truncated.
        packing: put several documents into one sample.
        packing_strategy: `bfd` or `wrapped`, of `packing`.
        dataset_text_field: the column to train on; by the data's columns, if None.
        swarm: whatever else a job may say, by our own names, as `{"forward_codec": "aq2"}`.
    """

    output_dir: str | Path = "swarm-ft-output"
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 2
    gradient_accumulation_steps: int = 4
    learning_rate: float = 2e-5
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch"
    seed: int = 42
    gradient_checkpointing: bool = False
    max_length: int | None = 1024
    packing: bool = False
    packing_strategy: str = "bfd"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    dataset_text_field: str | None = None
    eval_strategy: str = "steps"
    eval_steps: int | None = None
    save_strategy: str = "steps"
    save_steps: int = 0
    save_total_limit: int = 2
    load_best_model_at_end: bool = False
    metric_for_best_model: str = "loss"
    report_to: str | list[str] = "none"
    logging_dir: str | Path | None = None
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool = True
    swarm: JobKeywords = field(default_factory=lambda: JobKeywords())

    def keywords(self) -> dict[str, Any]:
        """The same as a job's options.

        Raises:
            BadOption: a value that a swarm has nothing for.
        """
        if self.num_train_epochs != int(self.num_train_epochs):
            raise BadOption(f"num_train_epochs {self.num_train_epochs}: expected whole ones")
        if self.max_length is None:
            raise BadOption("max_length: expected a number of tokens, got None")
        optims = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"}
        words = {"constant_with_warmup": "constant"}
        hub_id = self.hub_model_id or Path(self.output_dir).name
        return {
            "out": self.output_dir,
            "epochs": int(self.num_train_epochs),
            "steps": self.max_steps if self.max_steps > 0 else None,
            "micro_batch_size": self.per_device_train_batch_size,
            "batch_size": self.per_device_train_batch_size * self.gradient_accumulation_steps,
            "learning_rate": self.learning_rate,
            "lr_schedule": words.get(self.lr_scheduler_type, self.lr_scheduler_type),
            "warmup_steps": self.warmup_steps,
            "warmup_ratio": self.warmup_ratio,
            "weight_decay": self.weight_decay,
            "clip_grad_norm": self.max_grad_norm,
            "optim": optims.get(self.optim, self.optim),
            "seed": self.seed,
            "gradient_checkpointing": self.gradient_checkpointing,
            "seq_length": self.max_length,
            "packing": self.packing,
            "packing_strategy": self.packing_strategy,
            "completion_only_loss": self.completion_only_loss,
            "assistant_only_loss": self.assistant_only_loss,
            "text_column": self.dataset_text_field,
            "eval_strategy": self.eval_strategy,
            "eval_steps": self.eval_steps,
            "save_strategy": self.save_strategy,
            "save_steps": self.save_steps,
            "save_total_limit": self.save_total_limit,
            "load_best_model_at_end": self.load_best_model_at_end,
            "metric_for_best_model": self.metric_for_best_model,
            "report_to": self.report_to,
            "logging_dir": self.logging_dir,
            "push_to_hub": hub_id if self.push_to_hub else None,
            "hub_private_repo": self.hub_private_repo,
            **self.swarm,
        }


class TrainOutput(NamedTuple):
    """As the Trainer's: steps done, the mean of their losses, and what else was measured."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class SwarmTrainer:
    """Fine-tunes by a swarm: one that others run, or one that is started here for it.

        trainer = SwarmTrainer(
            model="gpt2", args=SwarmConfig(output_dir="tuned"), train_dataset=dataset,
            peft_config=LoraConfig(r=8), invite="swarm1...",
        )
        trainer.train()

    Args:
        model: a directory, a hub id, or a model of transformers, which a swarm here alone takes.
        args: how to train.
        train_dataset: a path, a hub id, a `datasets.Dataset`, or rows or texts.
        eval_dataset: held-out data, so too.
        peft_config: a `LoraConfig` of peft; without one all weights are trained.
        processing_class: the tokenizer of a model that is given as such; otherwise a model has its
            own.
        invite: into a swarm; None starts one here.
        swarm: a `LocalSwarm` that is up, instead.
        stages: of the swarm that is started here.

    Attributes:
        log_history: what the Trainer would log, by its names, a dictionary a step.
        report: all that is known of the run; None before it.

    Raises:
        BadOption: something that a swarm does not do.
    """

    def __init__(
        self,
        model: Any,
        args: SwarmConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        peft_config: Any = None,
        processing_class: Any = None,
        *,
        invite: str | None = None,
        swarm: LocalSwarm | None = None,
        stages: int = 2,
    ) -> None:
        args = _checked(args)
        if train_dataset is None:
            raise BadOption("train_dataset: expected one, got None")
        if invite is not None and swarm is not None:
            raise BadOption("invite, swarm: give one of the two")
        _check_model(model, processing_class, is_remote=invite is not None)
        self._keywords = args.keywords() | lora_keywords(peft_config)
        self._model, self._tokenizer = model, processing_class
        self._data = {"dataset": train_dataset, "eval_dataset": eval_dataset}
        self._invite, self._swarm, self._stages = invite, swarm, stages
        self.log_history: list[dict[str, float]] = []
        self.report: RunReport | None = None

    def train(self) -> TrainOutput:
        """Train, and leave the result in `args.output_dir`.

        Raises:
            SwarmError: why nothing came of it.
        """
        return waited(self._train())

    async def train_async(self) -> TrainOutput:
        """As `train`."""
        return await awaited(self._train())

    async def _train(self) -> TrainOutput:
        self.log_history = []
        with TemporaryDirectory(prefix="swarm-ft-") as folder:
            job = self._job(Path(folder))
            if self._invite is not None:
                report = await train_async(invite=self._invite, on_event=self._log, **job)
            elif self._swarm is not None:
                report = await self._swarm.train_async(on_event=self._log, **job)
            else:
                async with LocalSwarm(stages=self._stages) as swarm:
                    report = await swarm.train_async(on_event=self._log, **job)
        self.report = report
        return _output(report)

    def _job(self, folder: Path) -> JobKeywords:
        """What is to be trained, with what has no path written into `folder`."""
        data = {
            name: _path_of(name, one, folder) for name, one in self._data.items() if one is not None
        }
        job: JobKeywords = {**self._keywords, **data, "model": self._model}  # type: ignore[typeddict-item]
        if not isinstance(self._model, (str, Path)):
            self._model.save_pretrained(folder / "model")
            self._tokenizer.save_pretrained(folder / "model")
            job["model"] = str(folder / "model")
        return job

    def _log(self, event: RunEvent) -> None:
        step, values = numbers_of(event)
        if values:
            names = {name.replace("train/", "").replace("/", "_"): v for name, v in values.items()}
            self.log_history.append({"step": step, **names})


def _output(report: RunReport) -> TrainOutput:
    losses = report.losses
    metrics = {
        "train_runtime": report.totals.seconds,
        "train_samples_per_second": report.samples_per_second,
        "train_loss": sum(losses) / len(losses) if losses else 0.0,
    }
    if report.eval_after is not None:
        metrics["eval_loss"] = report.eval_after.loss
    return TrainOutput(len(losses), metrics["train_loss"], metrics)


def lora_keywords(peft_config: Any) -> dict[str, Any]:
    """A job's options for a `LoraConfig` of peft; none, without one.

    Raises:
        BadOption: it is another configuration, or says what a swarm does not do.
    """
    if peft_config is None:
        return {}
    if type(peft_config).__name__ != "LoraConfig":
        kind = type(peft_config).__name__
        raise BadOption(f"peft_config: expected a LoraConfig, got {kind}")
    for one in fields(peft_config):
        value, default = getattr(peft_config, one.name), one.default
        if one.default_factory is not MISSING:
            default = one.default_factory()
        known = one.name in _PEFT_TAKEN | _PEFT_SAYS_NOTHING
        if not known and value != default and value not in (None, False):
            raise BadOption(f"peft_config: {one.name}={value!a:.80}: a swarm does not do that")
    return {
        "adapter": "dora" if peft_config.use_dora else "lora",
        "lora_r": peft_config.r,
        "lora_alpha": peft_config.lora_alpha,
        "lora_dropout": peft_config.lora_dropout,
        "target_modules": _targets(peft_config.target_modules),
    }


def _targets(given: Any) -> str:
    if given is None or given == ALL_LINEAR:
        return ALL_LINEAR
    if isinstance(given, str):
        raise BadOption(
            f"peft_config: target_modules={given!a:.80}: expected '{ALL_LINEAR}' or a list of the "
            "ends of names; patterns are not taken"
        )
    return ",".join(sorted(given))


def _checked(args: object) -> SwarmConfig:
    if args is None:
        return SwarmConfig()
    if isinstance(args, SwarmConfig):
        return args
    kind = type(args).__name__
    raise BadOption(f"args: expected a SwarmConfig, which has the same names, got {kind}")


def _check_model(model: Any, tokenizer: Any, *, is_remote: bool) -> None:
    if isinstance(model, (str, Path)):
        own = getattr(tokenizer, "name_or_path", None)
        if tokenizer is not None and own != str(model):
            raise BadOption(
                f"processing_class: of '{own}'; '{model}' is read with its own tokenizer. Leave "
                "it out, or save both together and give their directory as the model"
            )
        return
    if not hasattr(model, "save_pretrained"):
        kind = type(model).__name__
        raise BadOption(f"model: expected a directory, a hub id or a model, got {kind}")
    if is_remote:
        raise BadOption(
            "model: volunteers fetch it by its name; give a hub id, or a directory that all have"
        )
    if tokenizer is None:
        raise BadOption("processing_class: a model that is given as such has no tokenizer with it")


def _path_of(name: str, data: Any, folder: Path) -> str:
    """Where data lies that can be read by a path, written there if it lies nowhere yet."""
    if isinstance(data, (str, Path)):
        return str(data)
    if hasattr(data, "save_to_disk"):
        data.save_to_disk(str(folder / name))
        return str(folder / name)
    if not isinstance(data, Iterable) or isinstance(data, (bytes, Mapping)):
        kind = type(data).__name__
        raise BadOption(f"{name}: expected a path, a hub id, a Dataset or rows, got {kind}")
    path = folder / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in data:
            file.write(json.dumps(row if isinstance(row, dict) else {"text": row}) + "\n")
    return str(path)
