"""`swarm_ft` exports its API to programs, and costs nothing before it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import swarm_ft
from deploy.call_keywords import MODULE, module

EXPORTED = {
    "__version__",
    "train",
    "train_async",
    "submit",
    "submit_async",
    "attach",
    "attach_async",
    "cancel",
    "cancel_async",
    "generate",
    "generate_async",
    "plan",
    "plan_async",
    "status",
    "status_async",
    "GeneratedText",
    "serve",
    "serve_async",
    "RunningPeer",
    "coordinate",
    "coordinate_async",
    "RunningCoordinator",
    "LocalSwarm",
    "SwarmTrainer",
    "SwarmConfig",
    "LocalPipeline",
    "BufferOptions",
    "ListenOptions",
    "Quotas",
    "RunReport",
    "SwarmError",
}


def test_what_is_offered_is_what_was_promised() -> None:
    assert set(swarm_ft.__all__) == EXPORTED  # type: ignore[attr-defined]
    assert len(swarm_ft.__all__) == len(EXPORTED)  # type: ignore[attr-defined]
    assert set(dir(swarm_ft)) >= EXPORTED


@pytest.mark.parametrize("name", sorted(EXPORTED))
def test_everything_offered_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(swarm_ft, name)
    assert name == "__version__" or (found.__name__ == name and len(found.__doc__) > 20)


def test_types_tell_the_same_names() -> None:
    stub = ast.parse(Path(swarm_ft.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported = {
        alias.asname
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == EXPORTED - {"__version__"}


def test_what_is_not_offered_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        swarm_ft.trian  # type: ignore[attr-defined] # noqa: B018


def test_importing_it_imports_nothing_else() -> None:
    words = "import sys, swarm_ft; print(*(n for n in sys.modules if n.startswith('swarm_ft.')))"
    heavy = "print(*({'torch', 'grpc', 'transformers', 'hivemind', 'click'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{words}; {heavy}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_calls_that_only_ask_import_no_torch() -> None:
    words = "import sys, swarm_ft; swarm_ft.status, swarm_ft.cancel"
    heavy = "print(*({'torch', 'transformers', 'hivemind', 'datasets'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{words}; {heavy}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_keywords_are_those_that_options_declare() -> None:
    assert MODULE.read_text(encoding="utf-8") == module()
