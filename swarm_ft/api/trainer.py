"""Training in a swarm with the interface of transformers' Trainer and TRL's SFTTrainer.

The trainer refuses arguments that a swarm does not support with a reason. It ignores none silently.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from swarm_ft.api.arguments import METRICS, TRAINER, Honoured
from swarm_ft.api.client_calls import train_async
from swarm_ft.api.keyword_errors import keyword_errors
from swarm_ft.api.keywords import JobKeywords, TrainerKeywords
from swarm_ft.api.local_swarm import LocalSwarm
from swarm_ft.api.loop import run_awaitable, run_blocking
from swarm_ft.api.translation import TranslatedJob, check_argument_names, translate_arguments
from swarm_ft.base.log import get_logger
from swarm_ft.client.options import JobOptions
from swarm_ft.client.report import RunReport, metrics_of
from swarm_ft.client.reporting import event_metrics
from swarm_ft.errors import BadOption, OutOfTurn
from swarm_ft.protocol.messages.client import RunEvent
from swarm_ft.protocol.spec.options import build, by_names, suggestion

if TYPE_CHECKING:
    from transformers import TrainingArguments

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
    """The arguments of a `SwarmTrainer`, with all names of `TrainingArguments` and `SFTConfig`.

    `SwarmTrainer` refuses unsupported arguments and suggests the nearest option. It ignores
    arguments that do not change the result, and logs their names. `api/arguments.py` decides, for
    job files as well.

    Attributes:
        per_device_train_batch_size: Samples per microbatch; does not change the result.
        gradient_accumulation_steps: Microbatches per step.
        max_length: Maximum number of tokens per sample; longer documents are truncated.
        packing: Whether to pack several documents into one sample.
        packing_strategy: Strategy of `packing`: `bfd`, `bfd_split` or `wrapped`.
        dataset_text_field: Column to train on; None: chosen by the data's columns.
        swarm: Options of the job by our own names, such as `{"forward_codec": "aq2"}`.
        others: All other arguments, by name.

    Raises:
        BadOption: An argument is unknown; the message suggests the nearest one.
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
        left: dict[str, Any] = dict(arguments)
        self.__dict__["others"] = left.pop("others", {})  # `dataclasses.replace` passes it.
        for one in fields(self):
            if one.name != "others":
                default = JobKeywords() if one.name == "swarm" else one.default
                setattr(self, one.name, left.pop(one.name, default))
        check_argument_names(left, "SwarmConfig")
        self.others.update(left)

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
            BadOption: A swarm does not support some arguments; the message has all of them.
        """
        return {**self._translated().fields, **self.swarm}

    def notes(self) -> tuple[str, ...]:
        """Return lines about the arguments without effect; raises as `keywords` does."""
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
        return translate_arguments(arguments, "SwarmConfig")

    def _is_replaced(self, one: Field[Any]) -> bool:
        """Whether another name of the option, such as `max_seq_length`, replaces a default."""
        decision = TRAINER[one.name]
        is_option = isinstance(decision, Honoured) and decision.option
        is_default = getattr(self, one.name) == one.default
        return bool(is_option and is_default) and any(
            TRAINER[name] == decision and value is not None for name, value in self.others.items()
        )


_FIELDS = frozenset(one.name for one in fields(SwarmConfig))


class TrainOutput(NamedTuple):
    """The Trainer's output: number of steps, mean of their losses, and other metrics."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainerState(NamedTuple):
    """The progress of a run, with some of the fields of transformers' `TrainerState`.

    Attributes:
        global_step: Number of optimizer steps so far.
        max_steps: Number of steps of the run; 0 until it has ended.
        log_history: Logs of the run, see `SwarmTrainer`.
        best_metric: Best `metric_for_best_model` of all evaluations; None before the first.
        best_global_step: Step of the best evaluation; None before the first.
    """

    global_step: int
    max_steps: int
    log_history: list[dict[str, float]]
    best_metric: float | None
    best_global_step: int | None


class SwarmTrainer:
    """A Trainer that trains in an existing swarm, or in one that it starts on this machine.

        trainer = SwarmTrainer(
            model="gpt2", args=SwarmConfig(output_dir="tuned"), train_dataset=dataset,
            peft_config=LoraConfig(r=8), invite="swarm1...",
        )
        trainer.train()

    Args:
        model: Directory, hub id, or transformers model; the latter needs a swarm on this machine.
        args: Training arguments, see `SwarmConfig`. The same table translates a TrainingArguments
            of transformers or an SFTConfig of TRL, with that library's defaults.
        train_dataset: Path, hub id, `datasets.Dataset`, rows or texts to train on.
        eval_dataset: Held-out data, in the same forms.
        peft_config: `LoraConfig` of peft; None: all weights train.
        processing_class: Tokenizer of a transformers model; None: the model's own.
        invite: Invitation to a swarm; None: a swarm on this machine.
        swarm: Running `LocalSwarm` to train in, instead of `invite`.
        stages: Number of stages of a swarm that the trainer starts.
        others: Other arguments of Trainer and SFTTrainer, which must be None.

    Attributes:
        log_history: Logs with the Trainer's names, one dictionary per event.
        report: Report of the run; None until it has ended.

    Raises:
        BadOption: A swarm does not support an argument.
    """

    @keyword_errors()
    def __init__(
        self,
        model: Any,
        args: SwarmConfig | TrainingArguments | None = None,
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
            raise BadOption("train_dataset: expected data, got None")
        if invite is not None and swarm is not None:
            raise BadOption("invite, swarm: expected one of the two, got both")
        _check_model(model, processing_class, is_remote=invite is not None)
        self._keywords = args.keywords() | lora_keywords(peft_config)
        named = {"model": "model", "dataset": "data"}
        # Check the options before data is read.
        build(JobOptions, by_names(JobOptions, {**self._keywords, **named}))
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
            resume_from_checkpoint: Whether to resume this job's unfinished run in the swarm of
                `invite`, from its newest snapshot if necessary.

        Raises:
            BadOption: `resume_from_checkpoint` is a path, or `invite` is missing.
            SwarmError: The run has no result; the error is the cause.
        """
        return run_blocking(self._train(resume_from_checkpoint))

    async def train_async(self, resume_from_checkpoint: bool | None = None) -> TrainOutput:
        """Train like `train`."""
        return await run_awaitable(self._train(resume_from_checkpoint))

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the result from `args.output_dir`, where `train` wrote it, to another directory.

        Args:
            output_dir: Directory of the copy; None: no copy.

        Raises:
            OutOfTurn: No run has ended yet.
        """
        result = Path(self._ended("save_model").model_dir)
        if output_dir is not None and Path(output_dir).absolute() != result.absolute():
            shutil.copytree(result, output_dir, dirs_exist_ok=True)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Return the swarm's evaluation of the result, by the Trainer's names.

        Args:
            eval_dataset: None, since the swarm evaluates while it trains.

        Raises:
            BadOption: `eval_dataset` is not None.
            OutOfTurn: No run has ended yet, or it evaluated nothing.
        """
        if eval_dataset is not None:
            raise BadOption(
                "evaluate: expected no eval_dataset, since the swarm evaluates while it trains; "
                "pass it to SwarmTrainer, or load the result with transformers"
            )
        report = self._ended("evaluate")
        if report.eval_after is None:
            raise OutOfTurn(
                "evaluate: expected a run with evaluations; set eval_strategy='steps' and train"
            )
        metrics = {"loss": report.eval_after.loss, **metrics_of(report.eval_after, report.task)}
        return {f"eval_{name}": value for name, value in metrics.items()}

    @property
    def state(self) -> TrainerState:
        """The progress of the run, by its events so far."""
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
            raise OutOfTurn(f"{caller}: expected a finished run; call train() first")
        return self.report

    async def _train(self, resume: object) -> TrainOutput:
        if resume not in (None, False, True):
            raise BadOption(
                "resume_from_checkpoint: expected True or False, since the swarm has the checkpoint"
            )
        if resume and self._invite is None:
            raise BadOption(
                "resume_from_checkpoint: expected invite beside it, since a swarm on this machine "
                "ends with its runs"
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
        """Build the job's options; write data and a model without a path into `folder`."""
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
        step, values = event_metrics(event)
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
        BadOption: It is another configuration, or a swarm does not support one of its values.
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
            raise BadOption(
                f"peft_config: expected no {one.name}, which a swarm does not support, "
                f"got {value!a:.80}"
            )
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
            f"peft_config: target_modules: expected '{ALL_LINEAR}' or a list of ends of names, got "
            f"the pattern {given!a:.80}"
        )
    return ",".join(sorted(given))


_NO_CALLS = "peers run no code of a client; on_event of swarm_ft.train receives the losses"
_UNSUPPORTED = {
    "callbacks": "use log_history, report_to, or on_event of swarm_ft.train",
    "compute_metrics": METRICS,
    "preprocess_logits_for_metrics": METRICS,
    "compute_loss_func": _NO_CALLS,
    "data_collator": "the client tokenizes and pads rows itself (docs/how-to/prepare-data.md)",
    "formatting_func": "swarm={'template': 'Q: {question} A: {answer}'} formats rows, or map them",
    "optimizers": "args.optim and args.lr_scheduler_type choose them by name",
    "optimizer_cls_and_kwargs": "args.optim chooses one by name",
    "model_init": "pass model as a directory, a hub id or a model",
    "tokenizer": "its present name is processing_class",
}
"""Reasons to refuse an argument of Trainer or SFTTrainer, by its name."""


def _check_others(others: Mapping[str, Any]) -> None:
    """Refuse arguments of other Trainers."""
    for name, value in others.items():
        if name in TRAINER:
            raise BadOption(f"{name}: expected it in args, as SwarmConfig({name}=...)")
        if name not in _UNSUPPORTED:
            raise BadOption(f"{name}: no such argument{suggestion(name, _OWN_NAMES)}")
        if value not in (None, [], (None, None)):
            raise BadOption(f"{name}: {_UNSUPPORTED[name]}")


_OWN_NAMES = (
    *("model", "args", "train_dataset", "eval_dataset", "peft_config", "processing_class"),
    *("invite", "swarm", "stages"),
)


def _checked(args: object) -> SwarmConfig:
    if args is None:
        return SwarmConfig()
    if isinstance(args, SwarmConfig):
        return args
    kinds = [kind.__name__ for kind in type(args).__mro__]
    if "TrainingArguments" in kinds:  # of transformers, which this does not import
        given: Any = args
        return SwarmConfig(**given.to_dict())
    raise BadOption(
        "args: expected a SwarmConfig, a TrainingArguments of transformers or an SFTConfig of TRL, "
        f"got {kinds[0]}"
    )


def _check_model(model: Any, tokenizer: Any, *, is_remote: bool) -> None:
    if isinstance(model, (str, Path)):
        own = getattr(tokenizer, "name_or_path", None)
        if tokenizer is not None and own != str(model):
            raise BadOption(
                f"processing_class: expected the tokenizer of '{model}', got that of '{own}'; "
                "leave it out, or save both together and pass their directory as the model"
            )
        return
    if not hasattr(model, "save_pretrained"):
        kind = type(model).__name__
        raise BadOption(f"model: expected a directory, a hub id or a model, got {kind}")
    if is_remote:
        raise BadOption(
            "model: expected a hub id, or a directory that all peers have, got a model; peers "
            "fetch models by name"
        )
    if tokenizer is None:
        raise BadOption("processing_class: expected the tokenizer of the model, got None")


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
