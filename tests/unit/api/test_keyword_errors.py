"""Messages name arguments where a program called, and commands keep their flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swarm_ft.api.coordinator_options import CoordinatorOptions
from swarm_ft.api.keyword_errors import as_keywords, keyword_errors
from swarm_ft.api.serve_options import ServeOptions
from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadOption, SwarmError
from swarm_ft.protocol.spec.options import option_fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MESSAGES = {
    "--steps: expected 1 to 2147483648, got -1": "steps: expected 1 to 2147483648, got -1",
    "--lr: expected": "learning_rate: expected",
    "--fw aq2: expected --bw": "forward_codec aq2: expected backward_codec",
    "--trace /x: is a directory": "trace_file /x: is a directory",
    "(--eval-dataset, --eval-split)": "(eval_dataset, eval_split)",
    "leave out --no-shuffle": "leave out shuffle=False",
    "--max-new-tokens 0": "max_new_tokens 0",
    "--memory 5: too much": "stage_memory_bytes 5: too much",
    "--upload-mbps: expected": "upload_mbps: expected",
    "--open, --no-relay": "is_public, has_relay=False",
    "decides that (serve-stage --dtype)": "decides that (serve-stage --dtype)",
    "let it raise coordinator --max-data": "let it raise coordinator --max-data",
    "'swarm-ft invite --role client' prints it": "'swarm-ft invite --role client' prints it",
    "file a--steps, --unknown-flag": "file a--steps, --unknown-flag",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_flags_become_arguments(message: str) -> None:
    assert as_keywords(message) == MESSAGES[message]


def test_an_error_keeps_its_kind() -> None:
    with pytest.raises(BadOption, match=r"^steps: no$") as raised, keyword_errors():
        raise BadOption("--steps: no")
    assert (raised.value.message, str(raised.value)) == ("steps: no", "steps: no")
    with pytest.raises(SwarmError, match=r"^nothing$"), keyword_errors():
        raise SwarmError("nothing")


@pytest.mark.parametrize("of", [JobOptions, ServeOptions, CoordinatorOptions])
def test_every_option_has_its_argument(of: type[DataclassInstance]) -> None:
    for one in option_fields(of):
        assert as_keywords(f"{one.flag}: no") == f"{one.field}: no"
