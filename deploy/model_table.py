"""Write the tables of docs/reference/models.md: `python -m deploy.model_table`."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from transformers import __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deploy.pages import with_part
from swarm_ft.errors import BadModel
from swarm_ft.protocol.spec.tasks import CausalLm
from swarm_ft.stage.architecture import anatomy_of
from tests.families import COMPOSED, small_config

PAGE = Path("docs/reference/models.md")
BEGIN = "<!-- by python -m deploy.model_table: begin -->\n"
_COMPOSED = "its checkpoints are of a text model and others; expected one of the text model alone"


def with_tables(page: str) -> str:
    """Return the page with its tables written anew.

    Raises:
        ValueError: it has not the lines around them.
    """
    return with_part(page, BEGIN, _tables())


def _tables() -> str:
    reasons = {name: _why_not(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    can = [name for name, why in reasons.items() if why is None]
    lines = [f"With transformers {__version__}, {len(can)} types can be cut:", ""]
    # Names such as `gpt-sw3` stay whole.
    names = textwrap.fill(", ".join(f"`{name}`" for name in can), 100, break_on_hyphens=False)
    lines += [names, "", "| cannot | why |", "|---|---|"]
    for why in dict.fromkeys(why for why in reasons.values() if why is not None):
        names = ", ".join(f"`{name}`" for name, other in reasons.items() if other == why)
        lines.append(f"| {names} | {why.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _why_not(model_type: str) -> str | None:
    if model_type in COMPOSED:
        return _COMPOSED
    try:
        anatomy_of(small_config(model_type), CausalLm())
    except BadModel as exc:
        return exc.message.partition("cannot be cut into stages: ")[2]
    except Exception as exc:  # noqa: BLE001 - of a family that wants other numbers
        return f"not tried: no small model of it is made here ({type(exc).__name__})"
    return None


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
