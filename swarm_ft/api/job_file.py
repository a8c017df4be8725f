"""Jobs in YAML: axolotl's keys where it has them, our options' names otherwise; and back.

Only what a swarm does is taken. A key that is unknown, or asks for something else, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import Declared, declared, nearest

MAX_FILE_BYTES = 1 << 20

RENAMED = {
    "base_model": "model",
    "sequence_len": "seq_length",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "lr_scheduler": "lr_schedule",
    "max_grad_norm": "clip_grad_norm",
    "optimizer": "optim",
    "lora_target_modules": "target_modules",
    "sample_packing": "packing",
    "output_dir": "out",
    "hub_model_id": "push_to_hub",
}
"""axolotl's keys of what is the same here under another name, with the field that has it."""
WORDS = {
    "lr_schedule": {"constant_with_warmup": "constant"},
    "optim": dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
}
"""By field, axolotl's words for what has another one here."""
VOLUNTEERS_DECIDE = "each volunteer decides that for its machine (serve-stage --dtype, --device)"
ELSEWHERE = {
    **dict.fromkeys(("bf16", "fp16", "tf32", "bfloat16", "float16"), VOLUNTEERS_DECIDE),
    **dict.fromkeys(("flash_attention", "sdp_attention", "xformers_attention"), VOLUNTEERS_DECIDE),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), "the swarm shares a model out itself"),
    "special_tokens": "the model's own tokenizer is used as it is",
    "chat_template": "the model's own chat template is used",
    "val_set_size": "name held-out data, with test_datasets",
    "lora_modules_to_save": "adapters alone are trained; --train-layers trains blocks whole",
    "resume_from_checkpoint": "a run goes on by itself; resume: true finds it again",
}
"""axolotl's keys that say nothing here: taken where they say off, auto or nothing."""
_OFF: tuple[Any, ...] = (None, False, "auto", 0, 0.0, "", [], {})


def read_job_file(path: Path) -> dict[str, Any]:
    """What a file says, by the names that it says it by.

    Raises:
        BadOption: it cannot be read, or is no mapping in YAML.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise BadOption(f"{path}: expected at most {MAX_FILE_BYTES} bytes")
        document = yaml.safe_load(text)
    except OSError as error:
        raise BadOption(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadOption(f"{path}: not YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise BadOption(f"{path}: expected keys and values, as 'base_model: gpt2'")
    return document


def job_fields(document: Mapping[str, Any], source: object = "job") -> dict[str, Any]:
    """The values of a job's options by `Declared.field`, as a file or a program wrote them.

    Args:
        document: what `read_job_file` gave.
        source: named in messages.

    Raises:
        BadOption: a key is unknown, is given twice under two names, or asks for what a swarm does
            not do.
    """
    return _Translation(source).fields(document)


class _Translation:
    """One document on its way to fields."""

    def __init__(self, source: object) -> None:
        self._source = source
        self._found: dict[str, Any] = {}
        self._known = {name: one.field for one in declared(JobOptions) for name in one.names}
        self._known |= RENAMED
        self._special: dict[str, Callable[[Any], None]] = {
            "datasets": self._datasets,
            "test_datasets": self._test_datasets,
            "adapter": self._adapter,
            "peft_use_dora": lambda value: self._if_true(value, "adapter", "dora"),
            "lora_target_linear": lambda v: self._if_true(v, "target_modules", "all-linear"),
            "train_on_inputs": self._train_on_inputs,
        }

    def fields(self, document: Mapping[str, Any]) -> dict[str, Any]:
        rest = dict(document)
        together = rest.pop("gradient_accumulation_steps", None)
        for key, value in rest.items():
            self._take(key.replace("-", "_"), value)
        if together is not None:
            self._accumulated(together)
        return {field: value for field, value in self._found.items() if value is not None}

    def _take(self, key: str, value: Any) -> None:
        if key in self._special:
            self._special[key](value)
        elif key in self._known:
            field = self._known[key]
            words = WORDS.get(field, {})
            self._set(field, words.get(value, value) if isinstance(value, str) else value, key)
        elif key in ELSEWHERE:
            if value not in _OFF:
                raise self._refused(key, ELSEWHERE[key])
        else:
            raise self._refused(key, f"there is no such key{nearest(key, self._names())}")

    def _names(self) -> list[str]:
        return [*self._known, *self._special, *ELSEWHERE, "gradient_accumulation_steps"]

    def _set(self, field: str, value: Any, key: str) -> None:
        if self._found.get(field) not in (None, value):
            raise self._refused(key, f"{field} is given twice, as {self._found[field]!r} too")
        self._found[field] = value

    def _if_true(self, value: Any, field: str, then: str) -> None:
        if value:
            # dora is what an adapter of lora becomes by another key
            self._found[field] = then

    def _adapter(self, value: Any) -> None:
        if value == "qlora":
            value = "lora"
            self._set("load_in_4bit", True, "adapter: qlora")
        if self._found.get("adapter") != "dora" or value != "lora":
            self._set("adapter", value, "adapter")

    def _train_on_inputs(self, value: Any) -> None:
        self._set("completion_only_loss", not value, "train_on_inputs")

    def _accumulated(self, steps: Any) -> None:
        """Axolotl's step has so many of its batches; ours says how many samples it has."""
        key, micro = "gradient_accumulation_steps", self._found.get("micro_batch_size", 1)
        if not (isinstance(steps, int) and isinstance(micro, int)):
            raise self._refused(key, f"expected a whole number, got {steps!a:.80}")
        self._set("micro_batch_size", micro, key)
        self._set("batch_size", steps * micro, key)

    def _datasets(self, value: Any) -> None:
        names = {"path": "dataset", "split": "split", "name": "subset", "ds_type": "data_format"}
        self._one_dataset("datasets", value, {**names, "field": "text_column"})

    def _test_datasets(self, value: Any) -> None:
        self._one_dataset("test_datasets", value, {"path": "eval_dataset", "split": "eval_split"})

    def _one_dataset(self, key: str, value: Any, names: Mapping[str, str]) -> None:
        if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)):
            words = "expected a list of one, such as '- path: notes.txt'; a run has one dataset"
            raise self._refused(key, f"{words}, which may be a directory of files")
        for name, one in value[0].items():
            if name == "type":
                self._check_type(key, one)
            elif name in names:
                self._set(names[name], one, f"{key}: {name}")
            else:
                raise self._refused(f"{key}: {name}", f"there is no such key{nearest(name, names)}")

    def _check_type(self, key: str, kind: Any) -> None:
        """What rows mean is told by their columns (docs/data.md)."""
        taken = ("completion", "chat_template", "alpaca", "pretraining")
        if kind not in taken:
            words = f"expected one of {', '.join(taken)}, got {kind!a:.80}; what rows mean is"
            raise self._refused(f"{key}: type", f"{words} told by their columns (docs/data.md)")

    def _refused(self, key: str, words: str) -> BadOption:
        return BadOption(f"{self._source}: {key}: {words}")


# ---- back


def job_yaml(options: JobOptions) -> str:
    """All options of a job as a file that asks for just that job; axolotl's keys where it can."""
    values = {one.field: _written(one, _value_at(options, one.field)) for one in _declared()}
    document: dict[str, Any] = {}
    names = {one.field: _name(one) for one in _declared()}
    data = {"path": values.pop("dataset"), "split": values.pop("split")}
    held_out = {"path": values.pop("eval_dataset"), "split": values.pop("eval_split")}
    document["base_model"] = values.pop("model")
    document["datasets"] = [_given(data)]
    if held_out["path"] is not None:
        document["test_datasets"] = [_given(held_out)]
    elif held_out["split"] is not None:
        document["eval_split"] = held_out["split"]
    document |= {names[field]: value for field, value in _given(values).items()}
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text


def _name(one: Declared) -> str:
    """The key of an option: axolotl's, or the longer one of our own."""
    axolotl = {field: key for key, field in RENAMED.items()} | {"learning_rate": "learning_rate"}
    return axolotl.get(one.field) or (one.long_flag or one.flag)[2:].replace("-", "_")


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _declared() -> tuple[Declared, ...]:
    return declared(JobOptions)


def _value_at(options: JobOptions, field: str) -> Any:
    parts = (options, options.reading, options.evaluation, options.train, options.outputs)
    return next(getattr(part, field) for part in parts if hasattr(part, field))


def _written(one: Declared, value: Any) -> Any:
    """As YAML has it: a word where there are words, else a number, a truth value or a text."""
    if one.is_repeated:
        return list(value) or None
    if one.choices and value is not None:
        word = one.word_for(value)
        return int(word) if one.kind is int else word
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
