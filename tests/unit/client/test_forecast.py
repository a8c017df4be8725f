"""Forecasts on machines whose speeds are all known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.client.forecast import (
    Forecast,
    PeerMemory,
    StageForecast,
    bytes_per_value,
    duration_words,
    forecast,
    with_mean_length,
)
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.ids import PeerId
from swarm_ft.protocol.machines.step_cost import SecondsRange, prior
from swarm_ft.protocol.messages.capacity import Machine, PlacedPeer
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import (
    Adapter,
    EvalCompression,
    RunSpec,
)
from swarm_ft.protocol.spec.sample_rows import pad_rows, words_of
from swarm_ft.stage.rehearsal import StageMemory
from tests.specs import USUAL_CODECS, model_spec, train_spec

FAST = Machine(flops_per_s=1e15, up_bytes_per_s=1e12, down_bytes_per_s=1e12, watts=100.0)


def job(**train: object) -> RunSpec:
    """Return a job with a GPT-2 of four blocks, eight microbatches a step, ten steps an epoch."""
    wanted: dict[str, object] = {"batch_size": 16, "micro_batch_size": 2, "seq_length": 128}
    wanted |= {"num_samples": 160, "num_steps": 30, **train}
    model = model_spec(
        hidden_size=768, vocab_size=50257, block_bytes=28_000_000, adapter_bytes=800_000
    )
    return RunSpec(model=model, train=train_spec(**wanted))


def on(*machines: Machine, replicas: int = 1) -> list[PlacedPeer]:
    """Return a placement with equal shares of the blocks, and so many peers for each share."""
    share = 4 * replicas // len(machines)
    return [
        PlacedPeer(
            peer_id=PeerId(f"peer-{number}"),
            layers=LayerRange(share * (number // replicas), share * (number // replicas + 1)),
            memory_bytes=1 << 33,
            machine=machine,
        )
        for number, machine in enumerate(machines)
    ]


def test_a_slow_uplink_is_what_a_step_is_bound_by() -> None:
    slow = Machine(flops_per_s=1e15, up_bytes_per_s=1e6, down_bytes_per_s=1e12)
    found = forecast(job(forward_codec="fp16", backward_codec="fp16"), on(FAST, slow))
    assert found.bound_by == "the uplink of peer-1"
    microbatch = 2 * 128 * 768 * 2 / 1e6
    assert found.step_s == pytest.approx(8 * microbatch, rel=0.05)
    assert found.samples_per_s == pytest.approx(16 / found.step_s, rel=1e-6)
    assert found.seconds == pytest.approx(30 * found.step_s)


def test_a_slow_machine_is_what_a_step_is_bound_by() -> None:
    slow = Machine(flops_per_s=1e10, up_bytes_per_s=1e12, down_bytes_per_s=1e12)
    found = forecast(job(), on(FAST, slow, FAST, FAST))
    assert found.bound_by == "the compute of peer-1 (layers 1-2)"
    assert found.stages[1].compute_s == pytest.approx(found.step_s / 8, rel=0.01)


def test_replicas_share_a_step_and_pay_for_their_sum() -> None:
    slow = Machine(flops_per_s=1e10, up_bytes_per_s=1e12, down_bytes_per_s=1e12)
    alone = forecast(job(), on(slow, slow))
    shared = forecast(job(), on(slow, slow, slow, slow, replicas=2))
    assert 1.5 < alone.step_s / shared.step_s < 2.0
    narrow = Machine(flops_per_s=1e15, up_bytes_per_s=1e7, down_bytes_per_s=1e12)
    summed = forecast(job(), on(narrow, narrow, narrow, narrow, replicas=2))
    halves = 2 * 28_000_000 + 50257 * 768 * 4
    assert summed.step_s == pytest.approx(halves / 1e7, rel=0.15)


def test_what_is_frozen_is_computed_less_and_sent_nowhere() -> None:
    whole = forecast(job(), on(FAST, FAST, FAST, FAST)).stages
    upper = forecast(job(train_layers="2-"), on(FAST, FAST, FAST, FAST)).stages
    lora = forecast(job(adapter=Adapter.LORA), on(FAST, FAST, FAST, FAST)).stages
    parts = [a.compute_s / b.compute_s for a, b in zip(upper, whole, strict=True)]
    assert parts == pytest.approx([1 / 3, 1 / 3, 1, 1])
    assert lora[1].compute_s == pytest.approx(whole[1].compute_s * 2 / 3)
    assert upper[0].down_bytes == 0 < whole[0].down_bytes
    assert upper[2].up_bytes < whole[2].up_bytes
    assert upper[3].up_bytes == whole[3].up_bytes


def test_what_is_frozen_is_computed_and_sent_once_a_sample() -> None:
    narrow = Machine(flops_per_s=1e12, up_bytes_per_s=1e6, down_bytes_per_s=1e12)
    evaluated = {"num_eval_samples": 8, "eval_steps": 10}
    once = job(train_layers="2-", frozen_codec="fp16", **evaluated)
    found = forecast(once, on(narrow, narrow, FAST, FAST))
    microbatch = 2 * 128 * 768 * 2 / 1e6
    assert found.first_step_s == pytest.approx(9 * microbatch, rel=0.1)
    assert found.step_s < 0.02 * found.first_step_s
    assert found.stages[0].up_bytes == pytest.approx(10 * 8 * microbatch * 1e6, rel=1e-2)
    assert found.evaluation is not None
    at_first, later = 4 * (2 + 2), 4 * 2  # four microbatches over two constant boundaries and one
    evaluated_bytes = (at_first + 3 * later) * microbatch * 1e6
    assert found.evaluation.sent_bytes == pytest.approx(evaluated_bytes, rel=1e-2)
    always = forecast(replace(once, train=replace(once.train, dropout=True)), on(*4 * [narrow]))
    assert always.stages[0].up_bytes > 0.1 * found.stages[0].up_bytes
    assert always.step_s > found.step_s


def test_what_all_stages_hold_is_at_each_and_summed_over_them() -> None:
    def stages(*, shared_bytes: int, **train: object) -> Sequence[StageForecast]:
        spec = job(num_steps=1, **train)
        spec = replace(spec, model=replace(spec.model, shared_bytes=shared_bytes))
        return forecast(spec, on(*[FAST] * 4)).stages

    table = 1_500_000
    for train, copies in (({}, 4), ({"train_layers": "2-"}, 1), ({"adapter": Adapter.LORA}, 1)):
        pairs = list(
            zip(stages(shared_bytes=table, **train), stages(shared_bytes=0, **train), strict=True)
        )
        # Of four members each sends three quarters in shares, and three times a quarter's sum.
        more = 1.5 * table if copies > 1 else 0.0
        assert [a.up_bytes - b.up_bytes for a, b in pairs] == pytest.approx([more] * 4)


def test_tied_embeddings_are_summed_over_both_ends_alone() -> None:
    spec = job(num_steps=1)
    spec = replace(spec, model=replace(spec.model, tied_embeddings=True))
    tied = replace(spec, train=replace(spec.train, sync_tied_embeddings=True))
    pairs = zip(*(forecast(one, on(*[FAST] * 4)).stages for one in (tied, spec)), strict=True)
    more = [a.up_bytes - b.up_bytes for a, b in pairs]
    assert more == pytest.approx([50257 * 768 * 4, 0, 0, 50257 * 768 * 4])


def test_memory_is_of_the_microbatches_that_a_replica_holds() -> None:
    taken = StageMemory(held=1000, microbatch=100, computing=50, stepping=400)

    def memory_of(spec: RunSpec, placed: list[PlacedPeer]) -> list[PeerMemory | None]:
        stages = {peer.layers: taken for peer in placed}
        return [stage.memory for stage in forecast(spec, placed, stages).stages]

    in_four = memory_of(job(), on(FAST, FAST, FAST, FAST))
    assert [memory.microbatches for memory in in_four if memory] == [7, 5, 3, 1]
    assert [memory.temporaries for memory in in_four if memory] == [50, 50, 100, 300]
    assert [memory.total for memory in in_four if memory] == [1750, 1550, 1400, 1400]
    # Eight microbatches a step, of which four replicas have two each.
    shared = memory_of(job(), on(*[FAST] * 16, replicas=4))
    assert [memory.microbatches for memory in shared if memory] == [2, 2, 2, 1]
    # What is frozen and above nothing that trains lets go of each after its forward.
    upper = memory_of(job(train_layers="2-"), on(FAST, FAST, FAST, FAST))
    assert [memory.microbatches for memory in upper if memory] == [1, 1, 3, 1]


def test_memory_that_nobody_asked_for_is_not_told() -> None:
    assert [stage.memory for stage in forecast(job(), on(FAST, FAST)).stages] == [None, None]


def test_samples_that_come_again_are_sent_as_changes() -> None:
    slow = Machine(flops_per_s=1e15, up_bytes_per_s=1e6, down_bytes_per_s=1e12)
    spec = job(forward_codec="aq2", backward_codec="q2", key_codec="fp16")
    found = forecast(spec, on(slow, FAST))
    assert found.first_step_s > 5 * found.step_s
    assert found.seconds == pytest.approx(10 * found.first_step_s + 20 * found.step_s)


def test_what_nobody_measured_is_left_out_and_told() -> None:
    found = forecast(job(), on(Machine(), FAST))
    assert [words.partition(" did")[0] for words in found.unknown] == ["1 of 2 peers"] * 3
    assert found.step_s < 0.1
    assert forecast(job(), on(FAST, FAST)).unknown == ()


def test_evaluations_are_told_apart_from_training() -> None:
    slow = Machine(flops_per_s=1e15, up_bytes_per_s=1e6, down_bytes_per_s=1e12)
    changes = {"num_eval_samples": 10, "eval_steps": 7, "key_codec": "q8"}
    quiet = forecast(job(key_codec="q8"), on(FAST, slow, FAST, FAST))
    found = forecast(job(**changes), on(FAST, slow, FAST, FAST))
    assert quiet.evaluation is None
    assert quiet.seconds < found.seconds_range.low < found.seconds_range.high
    assert found.seconds_range.high < quiet.seconds + 23.6, "the last one is after all steps"
    alike = replace(found, seconds_range=quiet.seconds_range, samples_range=quiet.samples_range)
    assert replace(alike, evaluation=None) == quiet
    evaluation = found.evaluation
    assert evaluation is not None
    assert (evaluation.times, evaluation.samples) == (6, 10), "after 0, 7, 14, 21, 28 and 30 steps"
    sample = 128 * 768 * 4
    assert evaluation.sent_bytes == pytest.approx(6 * 10 * 3 * sample, rel=0.01)
    assert evaluation.seconds == pytest.approx(6 * 10 * sample / 1e6, rel=0.01)
    both = forecast(job(**changes, eval_compression=EvalCompression.BOTH), on(FAST, slow))
    assert both.evaluation is not None
    assert both.evaluation.samples == 20
    assert both.evaluation.sent_bytes == pytest.approx(6 * 10 * sample * 1.25, rel=0.03)
    assert (
        evaluation.line("evaluation")
        == "evaluation 6 times on 10 samples: sends 70.8 MB and takes up to 23.6 s in all"
    )


def test_what_shadows_take_is_told_where_a_quality_is_asked_for() -> None:
    """Expect two samples after 8, 16 and 24 of 30 steps, as float32, forward only."""
    slow = Machine(flops_per_s=1e15, up_bytes_per_s=1e6, down_bytes_per_s=1e12)
    where = on(FAST, slow, FAST, FAST)
    options = {"quality": 0.01, **USUAL_CODECS}
    shadows = forecast(job(**options), where).shadows
    assert shadows is not None
    assert (shadows.times, shadows.samples) == (3, 2)
    sample = 128 * 768 * 4
    assert shadows.sent_bytes == pytest.approx(3 * 2 * 3 * sample, rel=0.01)
    assert shadows.seconds == pytest.approx(3 * 2 * sample / 1e6, rel=0.01)
    (line,) = [line for line in forecast(job(**options), where).lines() if "shadows" in line]
    assert line == "shadows   3 times on 2 samples: sends 7.1 MB and takes up to 2.36 s in all"
    for spec, placed in (
        (job(), where),
        (job(**options), on(FAST)),
        (job(**options, train_layers="2-"), on(FAST, FAST)),
    ):
        found = forecast(spec, placed)
        assert found.shadows is None, "nothing is compressed that could be measured"
        assert not any("shadows" in line for line in found.lines())


def test_energy_is_of_all_who_work() -> None:
    found = forecast(job(), on(FAST, FAST))
    assert found.kwh == pytest.approx(200 * found.seconds / 3.6e6)


def test_a_line_says_the_most_important() -> None:
    found = Forecast(
        stages=(),
        first_step_s=2.0,
        step_s=1.0,
        seconds=7200.0,
        seconds_range=SecondsRange(5400.0, 7200.0, 10000.0),
        samples_per_s=3.14159,
        samples_range=(2.26, 4.1888),
        bound_by="the uplink of peer-1",
        kwh=0.0,
        evaluation=None,
        shadows=None,
        unknown=(),
    )
    assert found.line() == (
        "forecast  2.26 to 4.19 samples/s, 1.5 to 2.8 h (about 2 s/step at first, then "
        "1 s/step); slowest: the uplink of peer-1"
    )
    assert "range     wide, because this swarm has not measured a run yet" in found.lines()
    waits = replace(found, num_waiting=2, starts_after_s=240.0, num_learned=3)
    assert list(waits.lines())[1:] == [
        "queue     2 runs are queued before this one",
        "start     in about 4 min, once other runs have ended",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [((3.2, 5.9), "3.2 to 5.9 s"), ((90, 240), "1.5 to 4 min"), ((5400, 9000), "1.5 to 2.5 h")],
)
def test_a_duration_has_the_unit_of_its_longer_end(
    seconds: tuple[float, float], words: str
) -> None:
    assert duration_words(*seconds) == words


# ---- what the swarm learned, other runs, machines that are shared

SMALL = Machine(flops_per_s=1e13, up_bytes_per_s=1e9, down_bytes_per_s=1e9, cores=2.0, host="one")


def test_a_small_model_takes_what_blocks_frames_and_steps_take() -> None:
    """Each sample has two frames a direction; nothing else of a step takes time here."""
    bare = forecast(job(), on(SMALL, SMALL))
    found = forecast(job(), on(SMALL, SMALL), costs=prior())
    assert 2 * bare.step_s < found.step_s
    least, likely, most = found.seconds_range
    assert bare.seconds < least < likely < most
    assert found.samples_range[0] < found.samples_per_s < found.samples_range[1]


def test_peers_on_one_machine_share_its_cores_and_are_named() -> None:
    slow = replace(SMALL, flops_per_s=1e10)
    apart = [replace(slow, host=name) for name in "abcd"]
    spec = job()
    spec = replace(spec, model=replace(spec.model, vocab_size=512))
    together = forecast(spec, on(*[slow] * 4))
    assert together.step_s > 1.3 * forecast(spec, on(*apart)).step_s
    assert (
        together.bound_by == "the cores of the machine of peer-0 and peer-1 and peer-2 and peer-3"
    )
    assert together.shared == (
        "peer-0 and peer-1 and peer-2 and peer-3 share one machine, "
        "which computes for 2 of them at once",
    )
    assert forecast(job(), on(*apart)).shared == ()


def test_other_runs_on_the_same_peers_stretch_a_step_while_they_last() -> None:
    alone = on(replace(SMALL, flops_per_s=1e10, host=""))
    busy = [replace(one, num_runs=1, busy=0.8) for one in alone]
    spec = job()
    quiet, full = forecast(spec, alone), forecast(spec, busy)
    assert full.seconds == pytest.approx(1.8 * quiet.seconds)
    assert full.shared == ("peer-0 spends 80 % of its time on 1 other run",)
    half = forecast(spec, busy, other_runs_s=full.seconds / 2)
    assert half.seconds == pytest.approx((full.seconds + quiet.seconds) / 2)
    assert forecast(spec, busy, other_runs_s=0.0).seconds == pytest.approx(quiet.seconds)


def test_a_link_that_other_runs_share_is_whole_once_they_end() -> None:
    """Check a job whose steps take as long as one uplink, of which another run takes half."""
    slow = Machine(flops_per_s=1e15, up_bytes_per_s=1e6, down_bytes_per_s=1e12)
    spec = job(forward_codec="fp16", backward_codec="fp16")
    alone = on(FAST, slow)
    shared = [alone[0], replace(alone[1], num_runs=1, shared_up_bytes_per_s=5e5)]
    quiet, full = forecast(spec, alone), forecast(spec, shared)
    assert full.seconds > 1.9 * quiet.seconds
    half = forecast(spec, shared, other_runs_s=full.seconds / 2)
    assert half.seconds == pytest.approx((full.seconds + quiet.seconds) / 2)
    assert forecast(spec, shared, other_runs_s=0.0).seconds == pytest.approx(quiet.seconds)


def test_other_programs_on_a_machine_make_a_step_longer_and_the_range_wider() -> None:
    quiet = on(replace(SMALL, flops_per_s=1e10), replace(SMALL, flops_per_s=1e10))
    loaded = [replace(one, host_load=4.0) for one in quiet]
    alone, shared = (forecast(job(), placed, costs=prior()) for placed in (quiet, loaded))
    assert shared.step_s > 1.5 * alone.step_s
    assert shared.seconds_range.width > 1.05 * alone.seconds_range.width


def test_bytes_do_not_depend_on_what_was_learned() -> None:
    bare, found = (forecast(job(), on(SMALL, SMALL), costs=one) for one in (None, prior()))
    assert [(s.up_bytes, s.down_bytes) for s in bare.stages] == [
        (s.up_bytes, s.down_bytes) for s in found.stages
    ]


machines = st.builds(
    Machine,
    flops_per_s=st.floats(1e9, 1e15),
    up_bytes_per_s=st.floats(1e5, 1e10),
    down_bytes_per_s=st.floats(1e5, 1e10),
    round_trip_s=st.floats(0.0, 1.0),
    watts=st.floats(0.0, 1e3),
)


@given(st.lists(machines, min_size=2, max_size=2), st.integers(0, 1))
def test_a_better_machine_never_makes_it_slower(two: list[Machine], which: int) -> None:
    before = forecast(job(), on(*two))
    better = [FAST if number == which else machine for number, machine in enumerate(two)]
    after = forecast(job(), on(*better))
    assert after.step_s <= before.step_s * (1 + 1e-9)
    assert all(math.isfinite(value) and value >= 0 for value in (before.seconds, before.kwh))


@pytest.mark.parametrize(
    ("text", "expected"), [("none", 4.0), ("fp16", 2.0), ("q8", 1.0), ("aq4", 0.5), ("aq2", 0.25)]
)
def test_a_codecs_bytes_are_those_it_writes(text: str, expected: float) -> None:
    measured = bytes_per_value(parse_codec_spec(text, Direction.FORWARD))
    assert measured == pytest.approx(expected, rel=0.15)


def test_short_samples_take_what_they_are_long() -> None:
    spec = job()
    rows = [pad_rows(words_of([1] * length), 128) for length in (16, 48)] * 1500
    samples = [row.tobytes() for row in rows]
    short = with_mean_length(spec, samples)
    assert short == job(seq_length=32)
    assert with_mean_length(spec, samples[:1]).train.seq_length == 16


def test_what_is_recomputed_takes_its_time() -> None:
    lora, again = (
        forecast(job(adapter=Adapter.LORA, gradient_checkpointing=one), on(FAST, FAST)).stages[0]
        for one in (False, True)
    )
    assert again.compute_s == pytest.approx(1.5 * lora.compute_s)
