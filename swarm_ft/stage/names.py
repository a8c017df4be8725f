"""Names that users type: devices and models. These checks need no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from swarm_ft.errors import BadModel, BadOption

MAX_HUB_ID_CHARS = 96
_DEVICE = re.compile(r"auto|cpu|mps|cuda(?::\d{1,3})?")
_HUB_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_HUB_ID = re.compile(rf"(?:{_HUB_NAME}/)?{_HUB_NAME}", re.ASCII)
_ALLOWED = re.compile(rf"(?:{_HUB_NAME}/)?{_HUB_NAME}|{_HUB_NAME}/\*", re.ASCII)


def is_hub_id(reference: str) -> bool:
    """Whether a text is the id of a repository: `org/name`, or `name` as the oldest ones have."""
    is_short = len(reference) <= MAX_HUB_ID_CHARS
    is_plain = "--" not in reference and ".." not in reference and not reference.endswith(".git")
    return is_short and is_plain and _HUB_ID.fullmatch(reference) is not None


def check_allowed_models(names: Iterable[str]) -> None:
    """Check the values of `--allow-models`.

    Raises:
        BadOption: A value is neither a hub id nor an organisation with `/*`.
    """
    for name in names:
        if _ALLOWED.fullmatch(name) is None:
            raise BadOption(f"--allow-models: expected ORG/NAME or ORG/*, got {name[:100]!a}")


def check_model_folders(folders: Iterable[str | Path]) -> None:
    """Check the values of `--models`.

    Raises:
        BadOption: A value is no directory.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            found = "a file" if Path(folder).exists() else "a path that does not exist"
            raise BadOption(f"--models {folder}: expected a directory, got {found}")


def check_model_place(reference: str) -> bool:
    """Return whether a model is a local directory; otherwise it is searched on the hub.

    Raises:
        BadModel: The text is a path without a directory.
    """
    path = Path(reference)
    if path.is_dir():
        return True
    if path.is_absolute() or reference.startswith(".") or path.exists():
        raise BadModel(f"model '{reference}': expected a directory or a hub id; no such directory")
    return False


def check_device_name(text: str) -> None:
    """Check the value of `--device`, without a look at this machine's devices.

    Raises:
        BadOption: The text names no kind of device.
    """
    if _DEVICE.fullmatch(text) is None:
        raise BadOption(f"--device '{text}': expected auto, cpu, cuda, cuda:N or mps")
