"""Tree of errors: unique stable codes, all drawn in the module's docstring."""

import re

import pytest

from swarm_ft import errors
from swarm_ft.errors import BY_CODE, InternalError, SwarmError, from_code


def drawn_tree() -> set[tuple[str, str | None]]:
    """(name, parent's name) of every line of the docstring's drawing."""
    names = ["SwarmError"]
    drawn: set[tuple[str, str | None]] = {("SwarmError", None)}
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines():
        if match := re.match(r"^([│ ]*[├└]── )(\w+)", line):
            depth = len(match[1]) // 4
            names[depth:] = [match[2]]
            drawn.add((match[2], names[depth - 1]))
    return drawn


def classes() -> list[type[SwarmError]]:
    return [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, SwarmError)]


def test_every_error_is_drawn_under_its_parent() -> None:
    real = {(c.__name__, None if c is SwarmError else c.__bases__[0].__name__) for c in classes()}
    assert drawn_tree() == real


def test_every_error_has_a_code_of_its_own() -> None:
    assert {c.code: c for c in classes()} == BY_CODE
    assert len(BY_CODE) == len(classes())
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in BY_CODE)


def test_codes_are_frozen() -> None:
    """They cross the wire and appear in `--json`: never change one, only add."""
    assert sorted(BY_CODE) == [
        "bad-codec",
        "bad-dataset",
        "bad-frame",
        "bad-input",
        "bad-invite",
        "bad-layers",
        "bad-model",
        "bad-option",
        "bad-snapshot",
        "buffers-lost",
        "busy",
        "dht-unreachable",
        "internal",
        "journal-error",
        "journal-full",
        "malformed-message",
        "model-differs",
        "model-not-allowed",
        "model-unavailable",
        "non-finite",
        "non-finite-weights",
        "not-allowed",
        "not-found",
        "out-of-memory",
        "out-of-turn",
        "over-quota",
        "port-in-use",
        "protocol-error",
        "run-failed",
        "run-mismatch",
        "swarm-error",
        "unavailable",
        "unsupported-dtype",
        "version-mismatch",
    ]


@pytest.mark.parametrize("kind", classes())
def test_an_error_survives_as_its_code_and_message(kind: type[SwarmError]) -> None:
    arrived = from_code(kind("what happened").code, "what happened")
    assert type(arrived) is kind
    assert arrived.message == str(arrived) == "what happened"


def test_an_unknown_code_becomes_the_root() -> None:
    assert type(from_code("from-the-future", "")) is SwarmError


def test_no_code_leads_outside_the_tree() -> None:
    assert type(from_code("internal", "")) is InternalError
    assert type(from_code("__class__", "")) is SwarmError
