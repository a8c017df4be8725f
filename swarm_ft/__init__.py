"""swarm-ft: fine-tune a Hugging Face transformer across volunteers' machines.

docs/how-to/python.md describes what programs may use. Each name is imported when it is first used,
so `import swarm_ft` takes no time.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_WHERE = {
    "train": "api.client_calls",
    "train_async": "api.client_calls",
    "submit": "api.client_calls",
    "submit_async": "api.client_calls",
    "attach": "api.client_calls",
    "attach_async": "api.client_calls",
    "cancel": "api.coordinator_calls",
    "cancel_async": "api.coordinator_calls",
    "generate": "api.client_calls",
    "generate_async": "api.client_calls",
    "plan": "api.client_calls",
    "plan_async": "api.client_calls",
    "status": "api.coordinator_calls",
    "status_async": "api.coordinator_calls",
    "GeneratedText": "api.generation",
    "serve": "api.calls",
    "serve_async": "api.calls",
    "RunningPeer": "api.calls",
    "coordinate": "api.calls",
    "coordinate_async": "api.calls",
    "RunningCoordinator": "api.calls",
    "LocalSwarm": "api.local_swarm",
    "SwarmTrainer": "api.trainer",
    "SwarmConfig": "api.trainer",
    "LocalPipeline": "api.pipeline",
    "BufferOptions": "api.peer_home",
    "ListenOptions": "api.listen_options",
    "Quotas": "coordinator.facts.quotas",
    "RunReport": "client.report",
    "SwarmError": "errors",
}
"""Module below `swarm_ft` of each public name."""

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'swarm_ft' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"swarm_ft.{_WHERE[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
