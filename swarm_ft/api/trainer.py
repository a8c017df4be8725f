"""Training by the names of transformers' Trainer and TRL's SFTTrainer, in a swarm.

Arguments that a swarm has nothing for are refused with a reason; none is left out silently.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Unpack

from swarm_ft.api.arguments import METRICS, TRAINER, Honoured
from swarm_ft.api.client_calls import train_async
from swarm_ft.api.keyword_errors import keyword_errors
from swarm_ft.api.keywords import JobKeywords, TrainerKeywords
from swarm_ft.api.local_swarm import LocalSwarm
from swarm_ft.api.loop import awaited, waited
from swarm_ft.api.translation import TranslatedJob, check_argument_names, translated_arguments
from swarm_ft.client.options import JobOptions
from swarm_ft.client.report import RunReport, metrics_of
from swarm_ft.client.reporting import numbers_of
from swarm_ft.errors import BadOption, OutOfTurn
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.client import RunEvent
from swarm_ft.protocol.spec.options import build, by_names, nearest

logger = get_logger(__name__)

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


@dataclass(init=False)
class SwarmConfig:
    """Arguments by the names of `TrainingArguments` and `SFTConfig`, all of which it takes.

    Those that a swarm has nothing for are refused when a `SwarmTrainer` is made, with the option
    that comes nearest; those without effect on what is learned are ignored, and a line of the log
    lists them. `api/arguments.py` decides, for job files as well.

    Attributes:
        per_device_train_batch_size: samples that travel together; no effect on the result.
        gradient_accumulation_steps: number of these in a step.
        max_length: tokens of a sample at most; a longer document is truncated.
        packing: put several documents into one sample.
        packing_strategy: `bfd`, `bfd_split` or `wrapped`, of `packing`.
        dataset_text_field: the column to train on; by the data's columns, if None.
        swarm: other options of a job, by our own names, as `{"forward_codec": "aq2"}`.
        others: all other arguments that were given.

    Raises:
        BadOption: there is no such argument; the message names the nearest one.
    """

    output_dir: str | Path = "swarm-ft-output"
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 2
    gradient_accumulation_steps: int = 4
    learning_rate: float = 2e-5
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
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
    save_total_limit: int | None = 2
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = "loss"
    report_to: str | list[str] | None = "none"
    logging_dir: str | Path | None = None
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool | None = True
    swarm: JobKeywords = field(default_factory=lambda: JobKeywords())
    others: dict[str, Any] = field(default_factory=dict)

    def __init__(self, **arguments: Unpack[TrainerKeywords]) -> None:
        given: dict[str, Any] = dict(arguments)
        self.__dict__["others"] = given.pop("others", {})  # of dataclasses.replace
        for one in fields(self):
            if one.name != "others":
                default = JobKeywords() if one.name == "swarm" else one.default
                setattr(self, one.name, given.pop(one.name, default))
        check_argument_names(given, "SwarmConfig")
        self.others.update(given)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS:
            super().__setattr__(name, value)
        else:
            check_argument_names((name,), "SwarmConfig")
            self.others[name] = value

    def __getattr__(self, name: str) -> Any:
        others = self.__dict__.get("others", {})
        if name not in others:
            raise AttributeError(f"'SwarmConfig' object has no attribute {name!r}")
        return others[name]

    def keywords(self) -> dict[str, Any]:
        """Translate the arguments to a job's options.

        Raises:
            BadOption: arguments ask for what a swarm does not do; the message has all of them.
        """
        return {**self._translated().fields, **self.swarm}

    def notes(self) -> tuple[str, ...]:
        """List the arguments without effect, in lines; raises as `keywords` does."""
        return self._translated().notes

    def _translated(self) -> TranslatedJob:
        if self.max_length is None:
            raise BadOption("max_length: expected a number of tokens, got None")
        own = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("swarm", "others") and not self._is_replaced(one)
        }
        arguments = {
            name: value.value if isinstance(value, Enum) else value
            for name, value in {**own, **self.others}.items()
        }
        return translated_arguments(arguments, "SwarmConfig")

    def _is_replaced(self, one: Field[Any]) -> bool:
        """Return whether another name of the option, as `max_seq_length`, replaces a default."""
        decision = TRAINER[one.name]
        is_option = isinstance(decision, Honoured) and decision.option
        is_default = getattr(self, one.name) == one.default
        return bool(is_option and is_default) and any(
            TRAINER[name] == decision and value is not None for name, value in self.others.items()
        )


_FIELDS = frozenset(one.name for one in fields(SwarmConfig))


class TrainOutput(NamedTuple):
    """The Trainer's: number of steps, the mean of their losses, and other metrics."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainerState(NamedTuple):
    """A run's progress, by some of the names of transformers' `TrainerState`.

    Attributes:
        global_step: optimizer steps so far.
        max_steps: that the run has; 0 before its end is known.
        log_history: see `SwarmTrainer`.
        best_metric: of all evaluations, by `metric_for_best_model`; None before the first.
        best_global_step: the step of that evaluation.
    """

    global_step: int
    max_steps: int
    log_history: list[dict[str, float]]
    best_metric: float | None
    best_global_step: int | None


class SwarmTrainer:
    """A Trainer whose steps a swarm makes: one that others run, or one that it starts here.

        trainer = SwarmTrainer(
            model="gpt2", args=SwarmConfig(output_dir="tuned"), train_dataset=dataset,
            peft_config=LoraConfig(r=8), invite="swarm1...",
        )
        trainer.train()

    Args:
        model: a directory, a hub id, or a model of transformers, which a swarm here alone takes.
        args: how to train; see `SwarmConfig`.
        train_dataset: a path, a hub id, a `datasets.Dataset`, or rows or texts.
        eval_dataset: held-out data, so too.
        peft_config: a `LoraConfig` of peft; without one all weights are trained.
        processing_class: the tokenizer of a model that is given as such; otherwise a model has its
            own.
        invite: into a swarm; None starts one here.
        swarm: a `LocalSwarm` that is up, instead.
        stages: of the swarm that is started here.
        others: further arguments of Trainer and SFTTrainer, which are refused unless None.

    Attributes:
        log_history: the Trainer's logs by its names, a dictionary a step.
        report: the outcome of the run; None before its end.

    Raises:
        BadOption: an argument asks for what a swarm does not do.
    """

    @keyword_errors()
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
        **others: Any,
    ) -> None:
        _check_others(others)
        args = _checked(args)
        if train_dataset is None:
            raise BadOption("train_dataset: expected one, got None")
        if invite is not None and swarm is not None:
            raise BadOption("invite, swarm: give one of the two")
        _check_model(model, processing_class, is_remote=invite is not None)
        self._keywords = args.keywords() | lora_keywords(peft_config)
        named = {"model": "model", "dataset": "data"}
        build(JobOptions, by_names(JobOptions, {**self._keywords, **named}))  # before data is read
        for note in args.notes():
            logger.warning("SwarmConfig: %s", note)
        self._model, self._tokenizer = model, processing_class
        self._data = {"dataset": train_dataset, "eval_dataset": eval_dataset}
        self._invite, self._swarm, self._stages = invite, swarm, stages
        self._metric = args.metric_for_best_model or "loss"
        self.log_history: list[dict[str, float]] = []
        self.report: RunReport | None = None

    def train(self, resume_from_checkpoint: bool | None = None) -> TrainOutput:
        """Train, and write the result to `args.output_dir`.

        Args:
            resume_from_checkpoint: True goes on with this job's unfinished run in the swarm of
                `invite`, from its newest snapshot if need be.

        Raises:
            BadOption: a checkpoint is named, or there is no swarm that could have such a run.
            SwarmError: why there is no result.
        """
        return waited(self._train(resume_from_checkpoint))

    async def train_async(self, resume_from_checkpoint: bool | None = None) -> TrainOutput:
        """Do what `train` does."""
        return await awaited(self._train(resume_from_checkpoint))

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the result to another directory; `train` wrote it to `args.output_dir`.

        Args:
            output_dir: where to; None: it stays where it is.

        Raises:
            OutOfTurn: no run has ended yet.
        """
        result = Path(self._ended("save_model").model_dir)
        if output_dir is not None and Path(output_dir).absolute() != result.absolute():
            shutil.copytree(result, output_dir, dirs_exist_ok=True)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Return the swarm's evaluation of the result, by the Trainer's names.

        Args:
            eval_dataset: must be None: the swarm evaluates while it trains.

        Raises:
            BadOption: other data is given.
            OutOfTurn: no run has ended yet, or it evaluated nothing.
        """
        if eval_dataset is not None:
            raise BadOption(
                "evaluate: the swarm evaluates while it trains; give eval_dataset to SwarmTrainer, "
                "or load the result with transformers"
            )
        report = self._ended("evaluate")
        if report.eval_after is None:
            raise OutOfTurn("evaluate: the run evaluated nothing; eval_strategy='steps' does")
        metrics = {"loss": report.eval_after.loss, **metrics_of(report.eval_after, report.task)}
        return {f"eval_{name}": value for name, value in metrics.items()}

    @property
    def state(self) -> TrainerState:
        """The progress of the run, as far as this client knows it."""
        steps = [one for one in self.log_history if "loss" in one]
        name = f"eval_{self._metric.removeprefix('eval_')}"
        evaluated = {one[name]: int(one["step"]) for one in self.log_history if name in one}
        best = (min if name == "eval_loss" else max)(evaluated, default=None)
        return TrainerState(
            global_step=int(steps[-1]["step"]) if steps else 0,
            max_steps=(self.report.num_steps or 0) if self.report else 0,
            log_history=self.log_history,
            best_metric=best,
            best_global_step=evaluated[best] if best is not None else None,
        )

    def _ended(self, caller: str) -> RunReport:
        if self.report is None:
            raise OutOfTurn(f"{caller}: call train() first; no run has ended yet")
        return self.report

    async def _train(self, resume: object) -> TrainOutput:
        if resume not in (None, False, True):
            raise BadOption("resume_from_checkpoint: expected True or False; the swarm has states")
        if resume and self._invite is None:
            raise BadOption(
                "resume_from_checkpoint: expected invite beside it; a swarm that was "
                "started here has ended with its runs"
            )
        self.log_history, self.report = [], None
        with TemporaryDirectory(prefix="swarm-ft-") as folder:
            job = self._job(Path(folder))
            if resume:
                job["resume"] = True
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
        """Make the job; data and a model without a path are written into `folder`."""
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
    """Translate a `LoraConfig` of peft to a job's options; None to no options.

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


_NO_CALLS = "the swarm's machines run no code of a client; on_event of swarm_ft.train has losses"
_OF_TRAINERS = {
    "callbacks": "log_history, report_to and on_event of swarm_ft.train have what they see",
    "compute_metrics": METRICS,
    "preprocess_logits_for_metrics": METRICS,
    "compute_loss_func": _NO_CALLS,
    "data_collator": (
        "the swarm's client tokenizes and pads rows itself (docs/how-to/prepare-data.md)"
    ),
    "formatting_func": "swarm={'template': 'Q: {question} A: {answer}'} formats rows, or map them",
    "optimizers": "args.optim and args.lr_scheduler_type choose them by name",
    "optimizer_cls_and_kwargs": "args.optim chooses one by name",
    "model_init": "give model as a directory, a hub id or a model",
    "tokenizer": "its name is processing_class now",
}
"""By the name of an argument of Trainer or SFTTrainer, why a swarm has nothing for it."""


def _check_others(others: Mapping[str, Any]) -> None:
    """Refuse arguments of Trainers that are not this one's."""
    for name, value in others.items():
        if name in TRAINER:
            raise BadOption(f"{name}: goes into args, as SwarmConfig({name}=...)")
        if name not in _OF_TRAINERS:
            raise BadOption(f"{name}: there is no such argument{nearest(name, _OWN_NAMES)}")
        if value not in (None, [], (None, None)):
            raise BadOption(f"{name}: {_OF_TRAINERS[name]}")


_OWN_NAMES = (
    *("model", "args", "train_dataset", "eval_dataset", "peft_config", "processing_class"),
    *("invite", "swarm", "stages"),
)


def _checked(args: object) -> SwarmConfig:
    if args is None:
        return SwarmConfig()
    if isinstance(args, SwarmConfig):
        return args
    kind = type(args).__name__
    hint = "; SwarmConfig(**args.to_dict()) takes it" if hasattr(args, "to_dict") else ""
    raise BadOption(f"args: expected a SwarmConfig, which has the same names, got {kind}{hint}")


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
    """Return the path of data; write it into `folder` if it has none."""
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
