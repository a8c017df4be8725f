"""One declaration makes an option of a command, a keyword of a call, and its check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import click
import pytest

from swarm_ft.api.coordinator_options import CoordinatorOptions, check_swarm
from swarm_ft.api.keywords import CoordinateKeywords, ServeKeywords
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.api.serve_options import ServeOptions
from swarm_ft.cli.coordinator import coordinator
from swarm_ft.cli.serve_stage import serve_stage
from swarm_ft.coordinator.facts.quotas import Quotas
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import from_keywords, option_fields, option_parts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROLES = [
    (ServeOptions, serve_stage, ServeKeywords, set()),
    (CoordinatorOptions, coordinator, CoordinateKeywords, {"journal"}),
]
OF_THE_COMMAND = {"invite", "initial_peers", "dht_prefix", "insecure"}
"""Parameters of `serve-stage` that lead to the swarm; calls of clients have them, too."""


@pytest.mark.parametrize(("of", "command", "keywords", "parameters"), ROLES)
def test_a_command_and_a_call_have_the_same_options(
    of: type[DataclassInstance], command: click.Command, keywords: type, parameters: set[str]
) -> None:
    declared = [one.field for one in option_fields(of)]
    assert len(declared) == len(set(declared)), "two options of one name would share their value"
    shown = {one.name for one in command.params if one.expose_value} - {"as_json"}
    assert shown == set(declared) | (OF_THE_COMMAND if of is ServeOptions else set())
    assert set(get_type_hints(keywords)) == set(option_parts(of)) - parameters


SERVE_REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "an unknown one": ({"layer": "0-2"}, "'layer': there is no such option; did you mean 'layers'"),
    "a wrong word": ({"pause_when": ["asleep"]}, "--pause-when: expected gpu-busy, on-battery or"),
    "a wrong choice": ({"dtype": "int8"}, "--dtype: expected float32 or bfloat16, got 'int8'"),
    "a size without a unit": ({"keep_disk_bytes": "5"}, "--keep-disk: expected a size"),
    "no traffic": ({"monthly_gb": 0.0}, "--monthly-gb: expected a finite number, above 0, got 0.0"),
    "too many": ({"max_stages": 9}, "--max-stages: expected 1 to 4, got 9"),
    "another dataclass": ({"buffers": ListenOptions()}, "buffers: expected BufferOptions(...)"),
}


@pytest.mark.parametrize("name", SERVE_REFUSED)
def test_a_peers_keywords_are_checked(name: str) -> None:
    keywords, words = SERVE_REFUSED[name]
    with pytest.raises(BadOption) as refused:
        from_keywords(ServeOptions, keywords)
    assert refused.value.message.startswith(words)


def test_keywords_are_values_or_their_words() -> None:
    options = from_keywords(
        ServeOptions, {"memory": "5GiB", "models": ["a", Path("b")], "pause_when": "gpu-busy"}
    )
    assert (options.stage_memory_bytes, options.models) == (5 << 30, (Path("a"), Path("b")))
    assert [str(one) for one in options.pause_when] == ["gpu-busy"]
    quotas = Quotas(queued=1, jobs=2)
    wanted = from_keywords(CoordinatorOptions, {"journal": "runs.db", "quotas": quotas})
    assert (wanted.journal, wanted.quotas, wanted.num_keepers) == (Path("runs.db"), quotas, 2)


COORDINATOR_REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "two places of snapshots": (
        {"keepers": 2, "snapshots": "s3://bucket"},
        "--keepers, --snapshots: expected one of the two, got both",
    ),
    "a page and none": (
        {"page": "127.0.0.1:0", "no_page": True},
        "--page, --no-page: expected one of the two, got both",
    ),
    "anybody without keys": (
        {"is_public": True, "insecure": True},
        "--open: expected a swarm with keys",
    ),
    "no hour": ({"queue_hours": 0}, "--queue-hours: expected a finite number, above 0, got 0"),
    "too many keepers": ({"keepers": 17}, "--keepers: expected 0 to 16, got 17"),
}


@pytest.mark.parametrize("name", COORDINATOR_REFUSED)
def test_options_of_a_coordinator_that_contradict_each_other_are_refused(name: str) -> None:
    keywords, words = COORDINATOR_REFUSED[name]
    with pytest.raises(BadOption) as refused:
        from_keywords(CoordinatorOptions, keywords)
    assert refused.value.message.startswith(words)


def test_keepers_are_the_default_unless_snapshots_lie_elsewhere() -> None:
    assert CoordinatorOptions().num_keepers == 2
    assert CoordinatorOptions(snapshots="s3://bucket").num_keepers == 0
    assert CoordinatorOptions(keepers=0).num_keepers == 0


def test_a_new_swarm_gets_keys_and_a_journal_that_lost_its_own_does_not(tmp_path: Path) -> None:
    options = CoordinatorOptions(journal=tmp_path / "runs.db")
    check_swarm(options)
    options.journal.touch()
    with pytest.raises(BadOption, match=r"runs\.db\.keys: expected the keys of the swarm of"):
        check_swarm(options)
    check_swarm(CoordinatorOptions(journal=options.journal, insecure=True))
    options.keys.mkdir()
    check_swarm(options)
    with pytest.raises(BadOption, match="--insecure: expected a swarm without keys, got keys in"):
        check_swarm(CoordinatorOptions(journal=options.journal, insecure=True))


def test_a_swarm_without_keys_stays_on_this_machine() -> None:
    far = ListenOptions("203.0.113.9")
    with pytest.raises(BadOption, match=r"203\.0\.113\.9"):
        check_swarm(CoordinatorOptions(insecure=True, listening=far))
    node = "/ip4/203.0.113.9/tcp/1/p2p/Q"
    with pytest.raises(BadOption, match="--initial-peers"):
        check_swarm(CoordinatorOptions(insecure=True, initial_peers=(node,)))


def test_a_file_of_nodes_is_read_for_both_forms(tmp_path: Path) -> None:
    (tmp_path / "nodes.txt").write_text("/ip4/127.0.0.1/tcp/1/p2p/Q\n", encoding="ascii")
    options = from_keywords(CoordinatorOptions, {"initial_peers": [f"@{tmp_path / 'nodes.txt'}"]})
    assert options.nodes == ("/ip4/127.0.0.1/tcp/1/p2p/Q",)
