"""A run that is run on from a moment, with a change and without."""

from dataclasses import replace

import pytest

from swarm_ft.api.what_if import Comparison, compare, parse_change
from swarm_ft.coordinator.member_names import MemberNames
from swarm_ft.coordinator.recording.entries import Numbered
from swarm_ft.coordinator.replay import Moment
from swarm_ft.errors import BadOption
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.spec.member_name import default_name
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.specs import model_spec, train_spec
from tests.unit.coordinator.conftest import RUN, FakePeer, Swarm

MBPS = 1e6 / 8
FAST = Machine(flops_per_s=1e9, up_bytes_per_s=1000 * MBPS, down_bytes_per_s=1000 * MBPS)
LAYERS = {"first": "0-2", "other": "0-2", "last": "2-4"}


def moment_of(layers: dict[str, str], **options: object) -> Moment:
    """A few steps into a run whose peers all are as fast."""
    swarm = Swarm()
    train = train_spec(num_steps=100, batch_size=8, num_samples=16, **options)
    model = model_spec(num_blocks=4, vocab_size=50, block_bytes=1000)
    swarm.submit(RunSpec(model=model, train=train))
    peers = [FakePeer(name, of) for name, of in layers.items()]
    for peer in peers:
        peer.compute_s = 1.0
    swarm.join(*peers)
    swarm.settle_until(lambda: swarm.run().committed_steps == 4)
    return Moment(
        version="1",
        unix_s=0.0,
        state=swarm.state,
        machines={PeerId(name): FAST for name in layers},
        relays=(),
        next_event=1,
        entry=Numbered(1),
    )


def what_if(moment: Moment, *words: str) -> Comparison:
    return compare(moment, RUN, [parse_change(one, moment.state) for one in words])


def test_a_narrow_link_makes_steps_longer_and_bounds_them() -> None:
    moment = moment_of(LAYERS)
    found = what_if(moment, "peer last: 0.01 Mbps up")
    step_s = moment.state.runs[RUN].measured.step_seconds
    assert found.baseline.step_s == pytest.approx(sum(step_s) / len(step_s), rel=0.05)
    assert found.changed.step_s is not None
    assert found.baseline.step_s is not None
    assert found.changed.step_s > 1.3 * found.baseline.step_s
    assert found.changed.bound_by == "the uplink of last"
    assert found.baseline.bound_by.startswith("the compute of ")
    assert found.changed.eta_s == pytest.approx(found.changed.step_s * 96, rel=0.1)
    assert found.changed.plans == ()
    assert found.unknown == ()
    assert what_if(moment, "peer last: 0.01 Mbps up") == found


def test_the_narrower_the_link_the_longer_the_step() -> None:
    moment = moment_of(LAYERS)
    found = [what_if(moment, f"peer first: {mbps} Mbps") for mbps in (0.1, 0.05, 0.01)]
    seconds = [one.changed.step_s or 0.0 for one in found]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_of_replicas_one_may_go_and_of_others_none() -> None:
    moment = moment_of(LAYERS)
    found = what_if(moment, "peer fir: gone")
    assert found.changed.num_steps == found.baseline.num_steps > 0
    assert any("its part goes to other" in words for _, words in found.changed.plans)
    assert found.changed.pipeline.startswith("layers 0-2: other (4 a step); layers 2-4: last")

    found = what_if(moment, "peer last: gone")
    assert (found.changed.num_steps, found.changed.step_s, found.changed.eta_s) == (0, None, None)
    assert found.changed.pipeline == "no peers at work"
    assert any(words.startswith("went back from step 4") for _, words in found.changed.plans)


def test_a_faster_replica_is_given_more() -> None:
    found = what_if(moment_of(LAYERS), "peer other: 3x compute")
    assert found.baseline.pipeline.startswith("layers 0-2: first (2 a step), other (2 a step)")
    assert found.changed.pipeline.startswith("layers 0-2: first (1 a step), other (3 a step)")


def test_what_nobody_measured_is_said() -> None:
    moment = replace(moment_of(LAYERS), machines={})
    found = what_if(moment, "peer last: 20 Mbps")
    assert found.unknown == (
        "3 of 3 peers did not report their compute speed",
        "2 of 3 peers did not report their link speed",
    )


def test_evaluations_and_snapshots_go_on() -> None:
    moment = moment_of(LAYERS, num_eval_samples=4, eval_steps=3, save_steps=4)
    found = what_if(moment, "peer other: gone")
    assert found.changed.num_steps == found.baseline.num_steps == 20


@pytest.mark.parametrize(
    "words",
    [
        "",
        "last: 20 Mbps",
        "peer last 20 Mbps",
        "peer last: 20 MB",
        "peer last: -1 Mbps",
        "peer last: fast",
        "peer last: 20 Mbps left",
        "peer last: 1e9 Mbps",
        "peer last: gone now",
    ],
)
def test_what_is_not_understood_is_refused(words: str) -> None:
    with pytest.raises(BadOption, match="expected 'peer NAME: 20 Mbps'"):
        parse_change(words, moment_of(LAYERS).state)


def test_whom_nobody_knows_and_what_is_nothing_is_refused() -> None:
    moment = moment_of({**LAYERS, "last-2": "2-4"})
    for words in ("peer nobody: gone", "peer la: gone"):
        with pytest.raises(BadOption, match="expected one of the peers first, other, last"):
            parse_change(words, moment.state)
    assert parse_change("peer last: gone", moment.state).peer_id == "last"
    for words in ("peer last: 0 Mbps", "peer last: 0x compute"):
        with pytest.raises(BadOption, match="more than 0"):
            parse_change(words, moment.state)


def test_a_peer_is_named_as_people_know_it() -> None:
    moment, names = moment_of(LAYERS), MemberNames()
    state = moment.state
    ids = dict(zip(state.members, ("a" * 32, "e" * 32, "b" * 32), strict=True))
    members = {PeerId(ids[peer]): member for peer, member in state.members.items()}
    state = replace(state, members=members)
    names.replace({"a" * 32: "ada-3090", "e" * 32: "", "b" * 32: "eve", "c" * 32: "gone"})
    for words in ("ada-3090", "aa", "a" * 32):
        assert parse_change(f"peer {words}: gone", state, names).peer_id == "a" * 32
    drawn = default_name("e" * 32)
    assert parse_change(f"peer {drawn}: gone", state, names).peer_id == "e" * 32
    for words in ("gone", "ada-3091"):
        with pytest.raises(BadOption, match=f"expected one of the peers ada-3090, {drawn}, eve"):
            parse_change(f"peer {words}: gone", state, names)
    names.add("b" * 32, "Ada-3O9O")
    assert parse_change("peer ada-3090: gone", state, names).peer_id == "a" * 32
    shown = names.shown(PeerId("a" * 32))
    assert shown == "ada-3090 (aaaaaaaa)"
    for words in (shown, "ada-3090  (aaaaaaaa)"):
        assert parse_change(f"peer {words} : gone", state, names).peer_id == "a" * 32


def test_texts_have_the_names_of_peers_and_no_ids() -> None:
    ids = {"first": "a" * 32, "other": "b" * 32, "last": "c" * 32}
    names = MemberNames()
    names.replace({"a" * 32: "ada", "b" * 32: "eve", "c" * 32: ""})
    moment = moment_of({ids[name]: layers for name, layers in LAYERS.items()})
    found = what_if(replace(moment, names=names), f"peer {'a' * 32}: gone")
    last = default_name("c" * 32)
    assert found.changes == ("peer ada: gone",)
    assert found.changed.pipeline.startswith(f"layers 0-2: eve (4 a step); layers 2-4: {last} (")
    assert any("its part goes to eve" in words for _, words in found.changed.plans)
    assert found.changed.bound_by.startswith("the compute of ")
    for one in (found.baseline, found.changed):
        words = (one.bound_by, one.pipeline, *(words for _, words in one.plans))
        assert not any(name in text for name in ids.values() for text in words)
