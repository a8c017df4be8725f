"""The translation of libraries' names and values, in files or calls, to a job's options.

A name keeps the meaning of its library. The translation refuses names that cannot keep it, all of
them in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_ft.api.arguments import (
    DECISIONS,
    MODEL_INIT,
    OFF,
    TEMPLATE,
    TOKENIZER,
    TRAINER,
    WORDS,
    Decision,
    Honoured,
    Ignored,
    Refused,
    shown,
)
from swarm_ft.api.axolotl import (
    COLUMNS,
    DEFAULTS,
    PLUGINS_WITHOUT_EFFECT,
    RENAMED,
    ROW_TYPES,
    RowType,
    row_problem,
)
from swarm_ft.client.formatting import printable
from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import OptionField, option_fields, suggestion

ACCUMULATION = "gradient_accumulation_steps"
NO_ROW_TYPE = RowType()


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslatedJob:
    """A job that was translated from a file or a call.

    Attributes:
        fields: Values of its options, by `Declared.field`.
        notes: Lines for people about keys without effect and defaults that differ from axolotl's.
    """

    fields: Mapping[str, Any]
    notes: tuple[str, ...]


def job_fields(document: Mapping[str, Any], source: object = "job") -> dict[str, Any]:
    """Return the fields of `translated` without its notes."""
    return dict(translate_job(document, source).fields)


def translate_job(document: Mapping[str, Any], source: object = "job") -> TranslatedJob:
    """Translate a file's keys to a job's options.

    Args:
        document: Keys and values of the file, as `read_job_file` returns them.
        source: Name of the file, for messages.

    Raises:
        BadOption: Some keys are unknown, repeated under two names, or unsupported, or their
            values are out of bounds. The message has all of them.
    """
    return _Translation(source, _JOB_FILE).job(document)


def translate_arguments(arguments: Mapping[str, Any], source: object) -> TranslatedJob:
    """Translate arguments of a Trainer to a job's options; raises as `translated` does.

    Args:
        arguments: Values by their names in `TRAINER`.
        source: Name of the arguments' owner, for messages.
    """
    return _Translation(source, _TRAINER).job(arguments)


def check_argument_names(names: Iterable[str], source: object) -> None:
    """Refuse names that no Trainer has.

    Raises:
        BadOption: Some names are unknown; the message suggests the nearest name for each.
    """
    unknown = {name: _TRAINER.unknown(name, _OPTION_NAMES) for name in names if name not in TRAINER}
    _raise_problems(unknown, source, _TRAINER)


@dataclass(frozen=True, slots=True)
class _Names:
    """The names that a translation knows.

    Attributes:
        noun: Noun for a name, in messages.
        decisions: Decisions on the libraries' names.
        has_options: Whether the names of the job's own options are allowed too.
    """

    noun: str
    decisions: Mapping[str, Decision]
    has_options: bool

    def unknown(self, name: str, others: Iterable[str]) -> str:
        """Return the message for an unknown name, with the nearest known one."""
        hint = suggestion(name, [*self.decisions, *(others if self.has_options else ())])
        if not self.has_options and name in _OPTION_NAMES:
            hint = f"; expected options of a job in swarm={{'{name}': ...}}"
        return f"no such {self.noun}{hint}"


_JOB_FILE = _Names("key", DECISIONS, has_options=True)
_TRAINER = _Names("argument", TRAINER, has_options=False)


def _raise_problems(problems: Mapping[str, str], source: object, names: _Names) -> None:
    lines = [f"{printable(name)}: {words}" for name, words in problems.items()]
    if len(lines) == 1:
        raise BadOption(f"{source}: {lines[0]}")
    if lines:
        numbered = "; ".join(f"({number}) {one}" for number, one in enumerate(lines, 1))
        raise BadOption(f"{source}: {len(lines)} {names.noun}s cannot be used: {numbered}")


_OPTIONS = {one.field: one for one in option_fields(JobOptions)}
_OPTION_NAMES = {name: one.field for one in _OPTIONS.values() for name in one.names}


class _Translation:
    """The translation of a document, which collects all problems and raises them together."""

    def __init__(self, source: object, names: _Names) -> None:
        self._source = source
        self._names = names
        self._key = ""
        self._found: dict[str, Any] = {}
        self._problems: dict[str, str] = {}
        self._notes: list[str] = []
        self._unused: list[str] = []
        self._explained: list[str] = []
        self._row_type: RowType | None = None
        self._trains_on_inputs: bool | None = None
        self._per_epoch: dict[str, Any] = {}
        self._columns: dict[str, str] | None = None
        self._known = {
            name: one.option
            for name, one in names.decisions.items()
            if isinstance(one, Honoured) and one.option
        }
        if names.has_options:
            self._known |= _OPTION_NAMES | RENAMED
        self._special: dict[str, Callable[[Any], None]] = {
            "datasets": lambda value: self._datasets(value, "dataset", "split"),
            "test_datasets": lambda value: self._datasets(value, "eval_dataset", "eval_split"),
            "adapter": self._adapter,
            "peft_use_dora": lambda value: self._if_true(value, "adapter", "dora"),
            "excess_length_strategy": lambda value: self._set("truncation", value),
            "lora_target_linear": lambda value: None,  # `_resolve_targets` reads it.
            "warmup_steps": self._warmup_steps,
            "warmup_ratio": self._warmup_ratio,
            "max_steps": self._max_steps,
            "per_device_train_batch_size": lambda value: self._set("micro_batch_size", value),
            "train_sampling_strategy": self._sampling,
            "shuffle_dataset": lambda value: self._set("shuffle", value) if value else None,
            "packing_strategy": self._packing_strategy,
            "dataset_text_field": self._text_field,
            "report_to": lambda value: self._set("report_to", value or "none"),
            "model_init_kwargs": self._model_init,
            "data_seed": lambda value: None,  # `_resolve_beside` reads it.
            "greater_is_better": lambda value: None,  # `_resolve_beside` reads it.
            "use_tensorboard": lambda value: self._if_true(value, "report_to", "tensorboard"),
            "shuffle_merged_datasets": lambda value: self._if_true(value, "shuffle", True),
            "curriculum_sampling": lambda value: self._set("shuffle", not value),
            "train_on_inputs": self._train_on_inputs,
            "evals_per_epoch": lambda value: self._per_epoch.update(eval=value),
            "saves_per_epoch": lambda value: self._per_epoch.update(save=value),
            "chat_template": self._chat_template,
            "special_tokens": self._special_tokens,
            "plugins": self._plugins,
            "model_type": self._model_type,
        }
        if names is _JOB_FILE:
            self._special["push_to_hub"] = self._repository
        if names is _TRAINER:
            # `_resolve_hub` sets both.
            self._special |= dict.fromkeys(("push_to_hub", "hub_model_id"), lambda value: None)

    def job(self, document: Mapping[str, Any]) -> TranslatedJob:
        keys = self._by_plain_name(document)
        accumulation = keys.pop(ACCUMULATION, None)
        for self._key, value in keys.items():
            if value is not None:
                self._take(self._key, value)
        if accumulation is not None:
            self._accumulate(accumulation)
        if self._columns:
            self._key = "column"
            self._set("column", [f"{role}={name}" for role, name in self._columns.items()])
        self._resolve_targets(keys)
        self._resolve_per_epoch()
        self._resolve_learned_part()
        self._check_flat_schedule(keys)
        self._resolve_beside(keys)
        self._resolve_hub(keys)
        self._resolve_dropout()
        _raise_problems(self._problems, self._source, self._names)
        self._note_unused()
        self._note_defaults(document)
        fields = {field: value for field, value in self._found.items() if value is not None}
        return TranslatedJob(fields=fields, notes=tuple(self._notes))

    def _by_plain_name(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Write the keys with underscores; two spellings of one key are a problem."""
        keys: dict[str, Any] = {}
        for key, value in document.items():
            name = key.replace("-", "_")
            if name in keys:
                self._problems[key] = f"expected it once, got {name} too"
            keys[name] = value
        return keys

    def _take(self, key: str, value: Any) -> None:
        decision = self._names.decisions.get(key)
        if key in self._special and (decision is not None or self._names.has_options):
            self._special[key](value)
        elif key in self._known:
            self._set(self._known[key], value)
        elif decision is not None:
            self._decide(key, decision, value)
        elif value not in ("", [], {}):
            self._refuse(self._names.unknown(key, [*self._known, *self._special, ACCUMULATION]))

    def _decide(self, name: str, decision: Decision, value: Any) -> None:
        if isinstance(decision, Refused):
            problem = decision.problem(value)
            if problem:
                self._refuse(problem)
        elif isinstance(decision, Ignored) and value not in (*OFF, decision.default):
            if decision.note:
                self._explained.append(f"{name}: no effect here; {decision.note}")
            else:
                self._unused.append(name)

    def _set(self, field: str, value: Any) -> None:
        """Set an option, unless it has another value already or cannot have this one."""
        words = WORDS.get(field, {})
        value = words.get(value, value) if isinstance(value, str) else value
        problem = _value_problem(_OPTIONS[field], value)
        if self._found.get(field) not in (None, value):
            self._refuse(f"expected one {field}, got {self._found[field]!r} too")
        elif problem:
            self._refuse(problem)
        else:
            self._found[field] = value

    def _if_true(self, value: Any, field: str, then: Any) -> None:
        if value and value not in OFF:
            # A second key turns an adapter from lora to dora.
            self._found[field] = then

    def _refuse(self, words: str) -> None:
        self._problems.setdefault(self._key, words)

    # ---- keys with a translation of their own

    def _adapter(self, value: Any) -> None:
        if value == "qlora":
            value = "lora"
            self._set("load_in_4bit", True)
        if self._found.get("adapter") != "dora" or value != "lora":
            self._set("adapter", value)

    def _accumulate(self, steps: Any) -> None:
        """Set the batch size to this number of microbatches."""
        self._key, micro = ACCUMULATION, self._found.get("micro_batch_size", 1)
        if not (isinstance(steps, int) and isinstance(micro, int)):
            self._refuse(f"expected a whole number, got {shown(steps)}")
            return
        self._set("micro_batch_size", micro)
        self._set("batch_size", steps * micro)

    def _resolve_targets(self, keys: Mapping[str, Any]) -> None:
        """Set all linear layers for `lora_target_linear`, and refuse other modules beside it."""
        if keys.get("lora_target_linear") in OFF:
            return
        self._key, names = "lora_target_modules", str(self._found.get("target_modules", ""))
        if "embed" in names or "lm_head" in names:
            self._refuse(f"expected linear layers of the blocks, got {shown(names)}")
        self._found["target_modules"] = "all-linear"

    def _warmup_steps(self, value: Any) -> None:
        """Set the warmup steps; below 1 they are a share of all steps, as in transformers 5."""
        is_share = isinstance(value, float) and 0 < value < 1
        if is_share and not self._found.get("warmup_ratio"):
            self._found["warmup_ratio"] = None
        self._set("warmup_ratio" if is_share else "warmup_steps", value)

    def _warmup_ratio(self, value: Any) -> None:
        """Set the warmup's share of all steps; 0 beside `warmup_steps` has no effect."""
        if value or not self._found.get("warmup_ratio"):
            self._set("warmup_ratio", value)

    def _max_steps(self, value: Any) -> None:
        """Set a positive number of steps; otherwise epochs decide, as in transformers."""
        if isinstance(value, bool) or not isinstance(value, int) or value > 0:
            self._set("steps", value)

    def _sampling(self, value: Any) -> None:
        if value in ("random", "sequential"):
            self._set("shuffle", value == "random")
        else:
            self._refuse(
                f"expected random or sequential, got {shown(value)}; the swarm does not sort "
                "samples by length"
            )

    def _packing_strategy(self, value: Any) -> None:
        """Set a packing strategy; TRL's `bfd_split` sets two options here."""
        if value == "bfd_split":
            self._set("truncation", "split")
            value = "bfd"
        self._set("packing_strategy", value)

    def _text_field(self, value: Any) -> None:
        """Set the column, unless it is TRL's default `text`, which is also the default here."""
        if value != "text":
            self._set("text_column", value)

    def _model_init(self, value: Any) -> None:
        if not isinstance(value, Mapping):
            self._refuse(f"expected names and values, got {shown(value)}")
            return
        outer = self._key
        for name, one in value.items():
            self._key = f"{outer}: {name}"
            decision = MODEL_INIT.get(str(name))
            if decision is None:
                self._refuse(f"no such argument{suggestion(str(name), MODEL_INIT)}")
            else:
                self._decide(self._key, decision, one)

    def _resolve_beside(self, keys: Mapping[str, Any]) -> None:
        """Refuse a second seed, and a direction that contradicts the metric."""
        seed = self._found.get("seed", _OPTIONS["seed"].default)
        self._key = "data_seed"
        if keys.get("data_seed") not in (None, seed):
            self._refuse(f"expected {seed}, since a run has one seed")
        metric = self._found.get("metric_for_best_model") or "loss"
        self._key, is_better = "greater_is_better", metric != "loss"
        if keys.get("greater_is_better") not in (None, is_better):
            self._refuse(f"expected {is_better} of metric_for_best_model {metric}")

    def _repository(self, value: Any) -> None:
        """Set the repository of a file's `push_to_hub`; false sets none."""
        if value is True:
            self._refuse("expected a repository, as [OWNER/]NAME, got True")
        elif value is not False:
            self._set("push_to_hub", value)

    def _resolve_hub(self, keys: Mapping[str, Any]) -> None:
        """Set a Trainer's `push_to_hub`; its default is the name of the output directory."""
        if self._names is _TRAINER and keys.get("push_to_hub"):
            self._key = "push_to_hub"
            folder = Path(self._found.get("out", _OPTIONS["out"].default)).name
            self._set("push_to_hub", keys.get("hub_model_id") or folder)

    def _resolve_per_epoch(self) -> None:
        """Set a strategy for once per epoch, which early stopping and the best weights support."""
        for what, value in self._per_epoch.items():
            self._key = f"{what}s_per_epoch"
            if value == 1 and value is not True and f"{what}_strategy" not in self._found:
                self._set(f"{what}_strategy", "epoch")
            else:
                self._set(f"{what}s_per_epoch", value)

    def _check_flat_schedule(self, keys: Mapping[str, Any]) -> None:
        """Refuse a warmup with transformers' `constant`, which has none."""
        has_warmup = self._found.get("warmup_steps") or self._found.get("warmup_ratio")
        for self._key in ("lr_scheduler", "lr_scheduler_type"):
            if keys.get(self._key) == "constant" and has_warmup:
                self._refuse("expected constant_with_warmup, since constant has no warmup")

    def _resolve_dropout(self) -> None:
        """Turn dropout on for adapters that have some, which turns the model's own on as well."""
        found = self._found
        share = found.get("lora_dropout")
        has_adapter = found.get("adapter", "none") not in ("none", None)
        if not share or not has_adapter or "dropout" in found:
            return
        if found.get("quality"):
            self._notes.append(f"lora_dropout: {share} has no effect beside quality")
            return
        found["dropout"] = True
        self._notes.append(
            f"lora_dropout: {share} sets dropout: true, whose noise limits how far delta codecs "
            "can compress (lora_dropout: 0 avoids it)"
        )

    def _chat_template(self, value: Any) -> None:
        if value not in OFF and not str(value).startswith("tokenizer_default"):
            self._refuse(TEMPLATE)

    def _special_tokens(self, value: Any) -> None:
        if not isinstance(value, dict):
            if value not in OFF:
                self._refuse(TOKENIZER)
            return
        names = [name for name, token in value.items() if token is not None]
        if set(names) <= {"pad_token"}:
            self._unused += [f"special_tokens: {name}" for name in names]
        else:
            self._refuse(f"{', '.join(map(str, names))}: {TOKENIZER}")

    def _plugins(self, value: Any) -> None:
        names = value if isinstance(value, list) else [value]
        others = [n for n in names if str(n).rpartition(".")[2] not in PLUGINS_WITHOUT_EFFECT]
        if others:
            self._refuse(f"expected no plugins, got {shown(others[0])}")
        elif names:
            self._unused.append(self._key)

    def _model_type(self, value: Any) -> None:
        if str(value).endswith("ForCausalLM"):
            self._unused.append(self._key)
        elif value not in OFF:
            self._refuse(
                f"expected a name that ends with ForCausalLM, got {shown(value)}; for classes use "
                "task: classification or token-classification"
            )

    # ---- datasets

    def _datasets(self, value: Any, path: str, split: str) -> None:
        key = self._key
        if value in OFF:
            return
        entries = value if isinstance(value, list) else []
        if not entries or not all(isinstance(entry, dict) for entry in entries):
            self._refuse("expected a list, such as '- path: notes.txt'")
            return
        if path == "eval_dataset" and len(entries) > 1:
            self._refuse("expected a list of one entry, which may be a directory of files")
            return
        for entry in entries:
            self._key = key
            self._dataset(entry, split)
        self._key = f"{key}: path"
        paths = [str(entry["path"]) for entry in entries if entry.get("path")]
        if len(paths) < len(entries):
            self._refuse("expected a path in each entry")
        else:
            self._set(path, paths[0] if len(paths) == 1 else tuple(paths))

    def _dataset(self, value: Mapping[Any, Any], split: str) -> None:
        """Translate an entry except its path; several entries must agree."""
        key = self._key
        fields = {"split": split, "name": "subset", "field": "text_column"}
        fields["ds_type"] = "data_format"
        entry = {str(name): one for name, one in value.items() if one is not None}
        for name, one in entry.items():
            self._key = f"{key}: {name}"
            problem = row_problem(name, one, [*fields, *COLUMNS, "path", "type"])
            if name == "type":
                self._row_type_of(one, entry)
            elif name in fields:
                self._set(fields[name], one)
            elif name not in ("path", *COLUMNS) and problem:
                self._refuse(problem)
        self._columns_of(entry, key)

    def _columns_of(self, entry: Mapping[str, Any], key: str) -> None:
        """Set the columns for the roles of the entry's type; all entries must agree."""
        row_type = ROW_TYPES.get(str(entry.get("type")), NO_ROW_TYPE)
        columns = {role: role for role in row_type.roles}
        for name, role in COLUMNS.items():
            column = entry.get(name, role)
            if not isinstance(column, str):
                self._key = f"{key}: {name}"
                self._refuse(f"expected a column, got {shown(column)}")
            elif column != role:
                columns[role] = column
        if not columns and "type" not in entry:
            return
        if self._columns not in (None, columns):
            self._key = key
            self._refuse("expected the same columns of all datasets")
        self._columns = columns

    def _row_type_of(self, name: Any, entry: Mapping[str, Any]) -> None:
        """Set the row type, which decides the meaning of columns (docs/how-to/prepare-data.md)."""
        row_type = ROW_TYPES.get(name) if isinstance(name, str) else None
        if row_type is None:
            known = ", ".join(ROW_TYPES)
            self._refuse(
                f"expected one of {known}, got {shown(name)}; for other rows map columns with "
                "column: (docs/how-to/prepare-data.md)"
            )
            return
        if self._row_type not in (None, row_type):
            self._refuse("expected the same type of all datasets")
        self._row_type = row_type
        if row_type.is_text:
            self._text_rows(entry)

    def _text_rows(self, entry: Mapping[str, Any]) -> None:
        """Set options for rows of one text, which continue in the next sample.

        Each line of a `.txt` file is a row, as in the library `datasets`.
        """
        self._found.setdefault("truncation", "split")
        is_plain = entry.get("ds_type") == "text" or str(entry.get("path", "")).endswith(".txt")
        if is_plain:
            self._set("data_format", "lines")
        elif "field" not in entry:
            self._set("text_column", "text")

    def _train_on_inputs(self, value: Any) -> None:
        if not isinstance(value, bool):
            self._refuse(f"expected true or false, got {shown(value)}")
        self._trains_on_inputs = bool(value)

    def _resolve_learned_part(self) -> None:
        """Set which part of a row the loss covers: inputs by `train_on_inputs` only."""
        inputs, row_type = self._trains_on_inputs, self._row_type
        self._key = "train_on_inputs"
        if row_type is not None and row_type.loss_option:
            self._set(row_type.loss_option, not inputs)
        elif inputs is not None and row_type is None and "train_on_inputs" not in self._problems:
            self._refuse(
                "expected type: chat_template or alpaca in datasets beside it; or use "
                "assistant_only_loss (messages) or completion_only_loss (prompts, instructions)"
            )

    # ---- notes

    def _note_unused(self) -> None:
        self._notes[:0] = self._explained
        if self._unused:
            self._notes.insert(0, f"{', '.join(self._unused)}: no effect on the result here")

    def _note_defaults(self, document: Mapping[str, Any]) -> None:
        """Add a note about defaults that differ from axolotl's, for a file with its keys."""
        if not {"base_model", "datasets"} & document.keys():
            return
        others = [
            f"{key} ({default} there, {_OPTIONS[field].default_word} here)"
            for field, (key, default) in DEFAULTS.items()
            if not any(name in self._found for name in (field, *_INSTEAD.get(field, ())))
        ]
        if others:
            self._notes.append(
                f"not set, and with a default that differs from axolotl's: {', '.join(others)}"
            )


_INSTEAD = {"epochs": ("steps",), "warmup_ratio": ("warmup_steps",)}
"""Fields that set the same thing, by field."""


def _value_problem(one: OptionField, value: Any) -> str:
    """Return the reason to refuse a value of a file; empty if it is allowed."""
    values = value if isinstance(value, list) else [value]
    if isinstance(value, dict) and one.is_repeated:
        values = list(value.values())
    elif isinstance(value, dict):
        return f"expected one value, got {shown(value)}"
    if any(isinstance(each, (list, dict)) for each in values):
        return f"expected one value, got {shown(value)}"
    is_text = one.kind is str and not one.choices and not one.is_repeated
    if is_text and any(isinstance(each, bool) or each is None for each in values):
        return f"expected text, got {shown(value)}; YAML reads yes, no, on and off as true or false"
    try:
        one.value_of(value)
    except BadOption as error:
        return error.message.removeprefix(f"{one.flag}: ")
    return ""
