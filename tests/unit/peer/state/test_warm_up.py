"""A run's codecs are compiled before its first frame."""

import pytest

from swarm_ft.peer.state import stage_state
from swarm_ft.peer.state.stage_state import compile_codecs


@pytest.fixture
def used(monkeypatch):
    """Codecs that were made, by their names, in a process that has compiled none."""
    names, from_spec = [], stage_state.from_spec

    def recorded(spec):
        names.append(str(spec))
        return from_spec(spec)

    monkeypatch.setattr(stage_state, "from_spec", recorded)
    stage_state._use_codec.cache_clear()
    return names


def test_every_codec_of_a_run_is_used_once(make_spec, used):
    spec = make_spec(
        forward_codec="aq4",
        fill_codec="aq2+z",
        backward_codec="q8",
        key_codec="fp16",
        dp_codec="q4",
    )
    compile_codecs(spec)
    assert sorted(used) == ["aq2f+z", "aq4tc", "fp16", "q4t", "q8t"]
    compile_codecs(spec)
    assert len(used) == 5


@pytest.mark.parametrize(
    "codecs",
    [
        {"forward_codec": "none", "backward_codec": "none"},
        {"forward_codec": "aqtop30", "backward_codec": "top10+efmix+z", "key_codec": "hq4"},
        {"forward_codec": "aqc0.5", "backward_codec": "q3+ef21", "key_codec": "lowrank4"},
        {"forward_codec": "aq1.5+z", "backward_codec": "q1+z", "buffer_bits": 4},
    ],
)
def test_every_family_can_be_compiled(make_spec, codecs):
    compile_codecs(make_spec(**codecs))
