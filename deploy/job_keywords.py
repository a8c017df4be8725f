"""Writes the typed names of a job's options: `python -m deploy.job_keywords`."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path

from swarm_ft.client.options import JobOptions
from swarm_ft.protocol.spec.options import Declared, declared

MODULE = Path("swarm_ft/api/keywords.py")
HEAD = '''"""A job's options as keywords with types; made of their declarations, by `make docs`.

`docs/options.md` says what each is for. Words stand for values that have words, as "lora".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict


class JobKeywords(TypedDict, total=False):
    """What `train` takes; whatever is left out is as by default."""

'''


def module() -> str:
    """The module as it should be."""
    return HEAD + "".join(f"    {one.field}: {_type(one)}\n" for one in declared(JobOptions))


def _type(one: Declared) -> str:
    wider = {"Path": "str | Path", "tuple": "Sequence[str]"}
    kind = wider.get(one.kind.__name__, one.kind.__name__)
    if one.choices and one.kind not in (bool, int):
        words = ", ".join(f'"{word}"' for word in one.choices)
        kind = f"Literal[{words}]"
    return f"{kind} | None" if one.default in (None, MISSING) else kind


if __name__ == "__main__":
    MODULE.write_text(module(), encoding="utf-8")
