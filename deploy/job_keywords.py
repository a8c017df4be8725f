"""Writes the typed names of a job's options: `python -m deploy.job_keywords`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.api.arguments import TRAINER
from swarm_ft.client.options import GenerateOptions, JobOptions, Outputs, PlanOptions
from swarm_ft.protocol.spec.options import Declared, declared

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MODULE = Path("swarm_ft/api/keywords.py")
HEAD = '''"""Keywords of calls with their types, written by `make reference` from the declarations.

`docs/reference/options.md` describes each. Words stand for values that have words, as "lora".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict
'''
KEYWORDS = {
    "JobKeywords": (JobOptions, "Arguments of `train`; one that is left out has its default."),
    "PlanKeywords": (PlanOptions, "Arguments of `plan`: a job without data."),
    "OutputKeywords": (Outputs, "Arguments of `attach`: places of the result and of reports."),
    "GenerateKeywords": (
        GenerateOptions,
        "Arguments of `generate`, with the names of transformers.",
    ),
}


def module() -> str:
    """Write the module's text."""
    of_options = "".join(_typed(name, of, words) for name, (of, words) in KEYWORDS.items())
    return f"{HEAD}{of_options}{_trainer_keywords()}"


def _trainer_keywords() -> str:
    """Write the arguments of `SwarmConfig`: its fields by their types, all others as objects."""
    from swarm_ft.api.trainer import SwarmConfig

    types = {one.name: str(one.type) for one in fields(SwarmConfig) if one.name != "others"}
    lines = [f"    {name}: {types.get(name, 'object')}\n" for name in (*TRAINER, "swarm")]
    words = "Names of `TrainingArguments` and `SFTConfig`; `api/arguments.py` decides on each."
    start = f'\n\nclass TrainerKeywords(TypedDict, total=False):\n    """{words}"""\n\n'
    return start + "".join(lines)


def _typed(name: str, of: type[DataclassInstance], words: str) -> str:
    lines = [
        f"    {one.field}: {_type(one)}\n"
        for one in declared(of)
        if (of, one.field) != (PlanOptions, "model")  # a parameter of its own
    ]
    return f'\n\nclass {name}(TypedDict, total=False):\n    """{words}"""\n\n' + "".join(lines)


def _type(one: Declared) -> str:
    wider = {"Path": "str | Path", "tuple": "Sequence[str]"}
    kind = wider.get(one.kind.__name__, one.kind.__name__)
    if one.choices and one.kind not in (bool, int):
        words = ", ".join(f'"{word}"' for word in one.choices)
        kind = f"Literal[{words}]"
    return f"{kind} | None" if one.default in (None, MISSING) else kind


if __name__ == "__main__":
    MODULE.write_text(module(), encoding="utf-8")
