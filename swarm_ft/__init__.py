"""swarm-ft: fine-tune a Hugging Face transformer across volunteers' machines.

What is offered to programs is told in docs/python.md; each is imported when it is first used, so
that `import swarm_ft` takes no time.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_WHERE = {
    "train": "api.calls",
    "train_async": "api.calls",
    "serve": "api.calls",
    "serve_async": "api.calls",
    "RunningPeer": "api.calls",
    "coordinate": "api.calls",
    "coordinate_async": "api.calls",
    "RunningCoordinator": "api.calls",
    "LocalSwarm": "api.local_swarm",
    "BufferOptions": "api.peer_home",
    "Listening": "api.listening",
    "Quotas": "coordinator.facts.quotas",
    "RunReport": "client.report",
    "SwarmError": "errors",
}
"""By name, the module that has it."""

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'swarm_ft' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"swarm_ft.{_WHERE[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
