"""Writes the typed names of a job's options: `python -m deploy.job_keywords`."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.client.options import GenerateOptions, JobOptions, Outputs, PlanOptions
from swarm_ft.protocol.spec.options import Declared, declared

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MODULE = Path("swarm_ft/api/keywords.py")
HEAD = '''"""Options of calls as keywords with types; made of their declarations, by `make docs`.

`docs/options.md` says what each is for. Words stand for values that have words, as "lora".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict
'''
KEYWORDS = {
    "JobKeywords": (JobOptions, "What `train` takes; whatever is left out is as by default."),
    "PlanKeywords": (PlanOptions, "What `plan` takes: a job without data."),
    "OutputKeywords": (Outputs, "What `attach` takes: where the result and reports go."),
    "GenerateKeywords": (GenerateOptions, "What `generate` takes, by transformers' names."),
}


def module() -> str:
    """Write the module's text."""
    return HEAD + "".join(_typed(name, of, words) for name, (of, words) in KEYWORDS.items())


def _typed(name: str, of: type[DataclassInstance], words: str) -> str:
    fields = "".join(f"    {one.field}: {_type(one)}\n" for one in declared(of))
    return f'\n\nclass {name}(TypedDict, total=False):\n    """{words}"""\n\n{fields}'


def _type(one: Declared) -> str:
    wider = {"Path": "str | Path", "tuple": "Sequence[str]"}
    kind = wider.get(one.kind.__name__, one.kind.__name__)
    if one.choices and one.kind not in (bool, int):
        words = ", ".join(f'"{word}"' for word in one.choices)
        kind = f"Literal[{words}]"
    return f"{kind} | None" if one.default in (None, MISSING) else kind


if __name__ == "__main__":
    MODULE.write_text(module(), encoding="utf-8")
