"""The least time of a step, against a simulated pipeline; and the scales of labs."""

import heapq
import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lab import Lab
from benchmarks.slow_network.cases import Row, run_case, system_named
from benchmarks.slow_network.limit import Order, Transfers, step_limit_s
from benchmarks.slow_network.swarm import PLAINTEXT, Setting, bits_per_value, measure_swarm
from benchmarks.slow_network.table import cost_of_tls
from benchmarks.slow_network.work import (
    GPT2_XL_V100,
    Measured,
    Network,
    Scale,
    Topology,
    Trial,
    Work,
)
from swarm_ft import codec
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.errors import BadCodec
from tests.draws import draws

TINY = Work(
    stages=3,
    tokens=256,
    channels=64,
    batch_size=4,
    micro_batch_size=1,
    forward_s=0.05,
    input_backward_s=0.06,
    weight_backward_s=0.04,
)


Act = Callable[[int, float], None]
"""What happens at a stage at a time."""


class Pipeline:
    """The quickest order there is: what others wait for first, and no bound on what is held."""

    def __init__(
        self,
        work: Work,
        transfers: Transfers,
        *,
        split: bool,
        fills: int = 0,
        drains: int = 0,
        home: bool = False,
    ) -> None:
        self.work, self.transfers, self.split = work, transfers, split
        self.fills, self.drains, self.home = fills, drains, home
        stages = range(work.stages)
        self.inputs = [0 for _ in stages]
        self.gradients = [0 for _ in stages]
        self.inputs[0] = work.num_microbatches
        self.done = [dict.fromkeys("fbw", 0) for _ in stages]
        self.busy = [False for _ in stages]
        self.links = {(stage, way): 0.0 for stage in stages for way in "fb"}
        self.events: list[tuple[float, int, Act, int]] = []
        self.tie = count()

    def run_s(self) -> float:
        now_s = 0.0
        for stage in range(self.work.stages):
            self.begin(stage, 0.0)
        while self.events:
            now_s, _, act, stage = heapq.heappop(self.events)
            act(stage, now_s)
            self.begin(stage, now_s)
        assert all(done["b"] == self.work.num_microbatches for done in self.done)
        return now_s

    def at(self, when_s: float, act: Act, stage: int) -> None:
        heapq.heappush(self.events, (when_s, next(self.tie), act, stage))

    def begin(self, stage: int, now_s: float) -> None:
        work, done, last = self.work, self.done[stage], stage == self.work.stages - 1
        if self.busy[stage]:
            return
        backward_s = work.input_backward_s if self.split else work.backward_s
        if not last and done["b"] < self.gradients[stage]:
            task, took_s = "b", backward_s
        elif done["f"] < self.inputs[stage]:
            task, took_s = ("fb", work.forward_s + backward_s) if last else ("f", work.forward_s)
        elif self.split and done["w"] < done["b"]:
            task, took_s = "w", work.weight_backward_s
        else:
            return
        self.busy[stage] = True
        self.at(now_s + took_s, lambda *at: self.finish(task, *at), stage)

    def finish(self, task: str, stage: int, now_s: float) -> None:
        self.busy[stage] = False
        for part in task:
            self.done[stage][part] += 1
        if "b" in task and stage > 0:
            left = self.work.num_microbatches - self.done[stage]["b"]
            transfers = self.transfers
            self.send(
                "b", stage, now_s, transfers.last_s if left < self.drains else transfers.backward_s
            )
        elif task == "f":
            fills = self.done[stage]["f"] <= self.fills
            took_s = self.transfers.fill_s if fills else self.transfers.forward_s
            assert took_s is not None
            self.send("f", stage, now_s, took_s)

    def send(self, way: str, stage: int, now_s: float, seconds: float) -> None:
        link = (stage, "f" if self.home else way)
        free_s = self.links[link] = max(now_s, self.links[link]) + seconds
        to = stage + 1 if way == "f" else stage - 1
        self.at(free_s + self.transfers.delay_s, lambda *at: self.arrive(way, *at), to)

    def arrive(self, way: str, stage: int, _now_s: float) -> None:
        (self.inputs if way == "f" else self.gradients)[stage] += 1


seconds = st.floats(0.0, 1.0)


def rounded_up(total_s: float) -> float:
    """Round up by the error of sums in another order: 0 and 1e-75 s are the same time."""
    return total_s * (1 + 1e-9) + 1e-12


@settings(max_examples=draws(300), deadline=None)
@given(
    stages=st.integers(2, 6),
    microbatches=st.integers(1, 12),
    times=st.tuples(seconds, seconds, seconds),
    ways=st.tuples(seconds, seconds, seconds),
    fill=st.tuples(st.integers(0, 12), st.floats(0.0, 1.0)),
    drain=st.tuples(st.integers(0, 12), st.floats(0.0, 1.0)),
    topology=st.sampled_from(Topology),
)
def test_no_pipeline_is_faster_than_the_limit(
    stages: int,
    microbatches: int,
    times: tuple[float, float, float],
    ways: tuple[float, float, float],
    fill: tuple[int, float],
    drain: tuple[int, float],
    topology: Topology,
) -> None:
    forward_s, input_s, weight_s = times
    work = replace(
        TINY,
        stages=stages,
        batch_size=microbatches,
        forward_s=forward_s,
        input_backward_s=input_s,
        weight_backward_s=weight_s,
    )
    (fills, fill_share), (drains, drain_share) = (
        (min(number, microbatches), share) for number, share in (fill, drain)
    )
    real = Transfers(
        forward_s=ways[0],
        fill_s=fill_share * ways[0],
        backward_s=ways[1],
        drain_s=drain_share * ways[1],
        delay_s=ways[2],
    )
    transfers = replace(
        real,
        forward_s=ways[0] * (1 - fills * (1 - fill_share) / microbatches),
        fill_s=real.fill_s if fills else None,
        backward_s=ways[1] * (1 - drains * (1 - drain_share) / microbatches),
        drain_s=real.drain_s if drains else None,
    )
    network, home = Network(topology=topology), topology is Topology.HOME
    split_s = step_limit_s(work, network, transfers, Order.SPLIT)
    whole_s = step_limit_s(work, network, transfers, Order.ONE_F_ONE_B)
    took_s = {
        split: Pipeline(work, real, split=split, fills=fills, drains=drains, home=home).run_s()
        for split in (True, False)
    }
    assert split_s <= rounded_up(took_s[True])
    assert whole_s <= rounded_up(took_s[False])
    assert split_s <= rounded_up(whole_s)
    if not home:
        assert whole_s <= rounded_up(step_limit_s(work, network, transfers, Order.GPIPE))


@pytest.mark.parametrize("mbps", [100.0, 25.0, 10.0, None])
def test_the_limit_of_the_preset_can_be_reached(mbps: float | None) -> None:
    """But for what overlaps badly: within a hundredth where compute is the limit, a tenth else."""
    network = Network(up_mbps=mbps, down_mbps=mbps)
    transfers = Transfers.of(network, measured_bytes(410_000, 310_000))
    for order in (Order.SPLIT, Order.ONE_F_ONE_B):
        took_s = Pipeline(GPT2_XL_V100, transfers, split=order is Order.SPLIT).run_s()
        limit_s = step_limit_s(GPT2_XL_V100, network, transfers, order)
        assert limit_s <= took_s <= limit_s * (1.01 if mbps != 10.0 else 1.1)


@pytest.mark.parametrize(("forward_bytes", "backward_bytes"), [(2, 4), (3, 3), (4, 2), (2, 1.5)])
def test_the_limit_of_home_links_can_be_reached(
    forward_bytes: float, backward_bytes: float
) -> None:
    network = Network(up_mbps=20.0, down_mbps=100.0, topology=Topology.HOME)
    measured = measured_bytes(2e5 * forward_bytes, 2e5 * backward_bytes)
    transfers = Transfers.of(network, measured)
    took_s = Pipeline(GPT2_XL_V100, transfers, split=True, home=True).run_s()
    limit_s = step_limit_s(GPT2_XL_V100, network, transfers, Order.SPLIT)
    assert limit_s * (1 - 1e-9) <= took_s <= limit_s * 1.01


def measured_bytes(forward_bytes: float, backward_bytes: float) -> Measured:
    return Measured(
        system="",
        step_s=(1.0,),
        cpus_used=0.0,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
    )


def test_the_preset_is_bound_by_compute_at_the_papers_rate() -> None:
    limit_s = step_limit_s(GPT2_XL_V100, Network(), Transfers(), Order.GPIPE)
    assert GPT2_XL_V100.batch_size / limit_s == pytest.approx(4.0, rel=0.01)


def test_a_lab_keeps_the_ratio_of_compute_to_transfers() -> None:
    trial = Trial(
        work=GPT2_XL_V100,
        network=Network(up_mbps=100.0, down_mbps=50.0, delay_ms=20.0),
        scale=Scale(dilation=4.0, shrink=16),
    )
    work, network = trial.lab_work, trial.lab_network
    assert (work.tokens, work.channels) == (256, 400)
    assert work.forward_s == pytest.approx(4 * 0.068)
    assert network.up_mbps is not None
    before = GPT2_XL_V100.microbatch_bytes / 100.0 / GPT2_XL_V100.forward_s
    assert work.microbatch_bytes / network.up_mbps / work.forward_s == pytest.approx(before)
    assert (network.down_mbps, network.delay_ms) == (50.0 / 64, 80.0)


def test_tensors_that_cannot_be_shrunk_so_are_refused() -> None:
    with pytest.raises(ValueError, match="square"):
        GPT2_XL_V100.scaled(Scale(shrink=3))


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("aq4/q8", Setting(fw="aq4", bw="q8")),
        ("aq2+z/q1.5+z@q3+z", Setting(fw="aq2+z", bw="q1.5+z", key="q3+z")),
        ("aq4~aq2/q8", Setting(fw="aq4", fill="aq2", bw="q8")),
        ("aq4/q8~q4/q2", Setting(fw="aq4", bw="q8", drain="q4", dp="q2")),
        ("none/none/q4", Setting(fw="none", bw="none", dp="q4")),
    ],
)
def test_a_setting_is_read_from_its_name(text: str, setting: Setting) -> None:
    assert Setting.parse(text) == setting


@pytest.mark.parametrize(
    "text", ["aq4", "aq4/q8/q4/q2", "aq4/q99", "aq4~x/q8", "aq4/q8~aq4", "gpip", ""]
)
def test_what_names_no_setting_is_refused(text: str) -> None:
    with pytest.raises((ValueError, BadCodec)):
        Setting.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"work": {"stages": 1}},
        {"work": {"batch_size": 5, "micro_batch_size": 2}},
        {"work": {"batch_size": 3, "replicas": 2}},
        {"work": {"tokens": 0}},
        {"network": {"up_mbps": -1.0}},
        {"network": {"delay_ms": -1.0}},
        {"scale": {"dilation": 0.0}},
        {"scale": {"shrink": 3}},
        {"steps": 0},
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Trial(
            work=replace(GPT2_XL_V100, **wrong.get("work", {})),
            network=Network(**wrong.get("network", {})),
            scale=Scale(**wrong.get("scale", {})),
            steps=wrong.get("steps", 1),
        )


def test_turns_tell_what_tls_costs() -> None:
    def row(name: str, mbps: float, samples_per_s: float) -> Row:
        network = Network(up_mbps=mbps, down_mbps=mbps)
        measured = replace(measured_bytes(1, 1), system=name)
        return Row(
            system=name,
            trial=Trial(work=TINY, network=network),
            samples_per_s=samples_per_s,
            limit_per_s=None,
            measured=measured,
        )

    plaintext = f"a{PLAINTEXT}"
    rows = [row("a", 100, 9.0), row(plaintext, 100, 10.0), row("a", 100, 9.9)]
    rows += [row(plaintext, 100, 10.0), row("gpipe", 100, 1.0), row("a", 10, 1.0)]
    assert list(cost_of_tls(rows)) == [
        "100 Mbps, a: TLS has 0.945 of plaintext's speed (turns: 2, 0.900 to 0.990)"
    ]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "tls"),
    [(Topology.PAIR, True), pytest.param(Topology.HOME, False, marks=pytest.mark.variant)],
)
def test_a_swarm_takes_its_time_and_sends_its_bytes(
    tmp_path: Path, topology: Topology, tls: bool
) -> None:
    network = Network(up_mbps=20.0, down_mbps=20.0, delay_ms=5.0, topology=topology)
    trial = Trial(work=TINY, network=network, steps=1)
    row = run_case(system_named("none/none", tls=tls), trial, tmp_path / "swarm")
    frame_bytes = TINY.microbatch_bytes
    assert frame_bytes < row.measured.forward_bytes < 1.01 * frame_bytes
    assert frame_bytes < row.measured.backward_bytes < 1.01 * frame_bytes
    assert row.efficiency is not None
    assert 0.1 < row.efficiency <= 1.0


@needs_root
@pytest.mark.slow
@pytest.mark.variant
def test_replicas_share_a_batch_and_sum_their_gradients(tmp_path: Path) -> None:
    work = replace(TINY, stages=2, replicas=2, stage_values=10_000)
    trial = Trial(work=work, network=Network(), steps=1)
    with Lab() as lab:
        measured = measure_swarm(lab, tmp_path / "swarm", trial, Setting.parse("aq4/q8/none"))
    assert 4 * 10_000 < measured.gradient_bytes < 1.1 * 4 * 10_000


# ---- bits from codecs' names

SHAPE = (128, 768)


@pytest.mark.parametrize(
    "text",
    ["none", "fp16", "bf16", "q4", "q8t", "q2.5+z", "top10", "top1", "top40", "qc0.5"],
)
def test_an_estimate_is_near_to_what_a_normal_sample_takes(text: str) -> None:
    spec = parse_codec_spec(text, Direction.FORWARD)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    taken_bits = 8 * len(codec.from_spec(spec).encode(x).payload) / x.numel()
    assert bits_per_value(spec) == pytest.approx(taken_bits, rel=0.1, abs=0.05)


def test_a_coarse_step_costs_no_less_than_nothing() -> None:
    assert bits_per_value(parse_codec_spec("aqc8", Direction.FORWARD)) == 0.0
    fine = bits_per_value(parse_codec_spec("aqc0.5", Direction.FORWARD))
    assert fine == pytest.approx(math.log2(4.1327 / 0.5), abs=1e-3)
