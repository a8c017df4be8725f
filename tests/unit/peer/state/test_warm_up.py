"""A run's codecs are compiled before its first frame."""

from typing import Any

import pytest

from swarm_ft import codec
from swarm_ft.codec import Codec
from swarm_ft.codec.spec import CodecSpec
from swarm_ft.peer.state import stage_state
from swarm_ft.peer.state.stage_state import compile_codecs
from tests.unit.peer.conftest import MakeSpec


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Codecs that were made, by their names."""
    names: list[str] = []
    from_spec = codec.from_spec

    def recorded(spec: CodecSpec) -> Codec:
        names.append(str(spec))
        return from_spec(spec)

    monkeypatch.setattr(stage_state, "from_spec", recorded)
    return names


def test_every_codec_of_a_run_is_used_once(make_spec: MakeSpec, used: list[str]) -> None:
    spec = make_spec(
        forward_codec="aq4",
        fill_codec="aq2+z",
        backward_codec="q8",
        drain_codec="q3",
        key_codec="fp16",
        dp_codec="q4",
        seq_length=11,  # as no other test has: nothing is compiled for it
    )
    compile_codecs(spec)
    assert sorted(used) == ["aq2f+z", "aq4tc", "fp16", "q3t", "q4t", "q8t"]
    compile_codecs(spec)
    assert len(used) == 6


@pytest.mark.parametrize(
    "codecs",
    [
        {"forward_codec": "none", "backward_codec": "none"},
        {"forward_codec": "aqtop30", "backward_codec": "top10+ef+z", "key_codec": "q4"},
        {"forward_codec": "aqc0.5", "backward_codec": "q3+ef21", "key_codec": "q8"},
        {"forward_codec": "aq1.5+z", "backward_codec": "q1+z", "buffer_bits": 4},
    ],
)
def test_every_family_can_be_compiled(make_spec: MakeSpec, codecs: dict[str, Any]) -> None:
    compile_codecs(make_spec(**codecs))
