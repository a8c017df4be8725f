"""A run with --trace: where every moment of every peer went, in causal order, on one clock."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.base.clock import Clock
from swarm_ft.client.trace import TraceFile
from swarm_ft.ids import PeerId
from swarm_ft.peer import node
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import ClockProbe, ClockReply, FromPeer, PlanStep
from swarm_ft.protocol.messages.timeline import StepTimeline
from swarm_ft.transport.methods import to_bytes
from tests.doubles import memory_transport
from tests.integration.conftest import Job, MakeJob
from tests.local_swarm import LocalSwarm

NUM_STEPS, BATCH_SIZE, MICRO_BATCH_SIZE = 4, 4, 2
PIPELINE = ["0-2", "2-4", "4-6"]
REPLICAS = ["0-3", "0-3", "3-6", "3-6"]
WAY = ["encode", "send", "receive", "decode"]


Event = dict[str, Any]
"""As it lies in the file."""


class SkewedClock:
    """That of another machine, which was started at another time."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def now_s(self) -> float:
        return time.monotonic() + self._ahead_s


async def trace_of(job: Job, tmp_path: Path, layers: list[str]) -> list[Event]:
    """The trace's events; the run begins with all peers, and when somebody watches already."""
    path = tmp_path / "trace.json"
    async with LocalSwarm(tmp_path, []) as swarm:
        for index, part in enumerate(layers):
            clock = SkewedClock(1_000.0 * index)
            await swarm.add_peer(PeerId(f"peer-{index}"), part, clock)
        await swarm.all_joined()
        endless = replace(job.spec, train=replace(job.spec.train, num_steps=100_000))
        before = await swarm.client.submit(endless, job.samples)
        status = await swarm.client.submit(job.spec, job.samples)
        assert status.phase is RunPhase.QUEUED
        with TraceFile(path, pytest.fail) as trace:
            events = swarm.client.watch(status.run_id, pytest.fail, trace.add)
            await anext(events)
            await swarm.client.cancel(before.run_id)
            async for _ in events:
                pass
    found: list[Event] = json.loads(path.read_text())
    return found


class Shown:
    """A trace as its reader sees it."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.slices = [event for event in events if event["ph"] == "X"]
        titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.layers = {pid: title.split()[1] for pid, title in titles.items()}
        threads = [event for event in events if event["name"] == "thread_name"]
        self.lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in threads}
        self.error_us = max(e["args"]["us"] for e in events if e["name"] == "clock error")

    def named(self, *names: str) -> list[Event]:
        return [event for event in self.slices if event["name"] in names]

    def frames(self) -> dict[tuple[Any, ...], list[Event]]:
        """The slices of each frame, by its name."""
        frames: defaultdict[tuple[Any, ...], list[Event]] = defaultdict(list)
        for event in self.named(*WAY):
            args = event["args"]
            key = ("step", "boundary", "direction", "microbatch", "sample")
            frames[tuple(args[name] for name in key)].append(event)
        return frames


def end(event: Event) -> float:
    ended: float = event["ts"] + event["dur"]
    return ended


TracedRun = tuple[Shown, float, float]
"""What is shown, and when the run began and ended, in microseconds."""


@pytest.fixture(params=[PIPELINE, REPLICAS], ids=["pipeline", "replicas"])
def layers(request: pytest.FixtureRequest) -> list[str]:
    chosen: list[str] = request.param
    return chosen


@pytest.fixture
async def run(
    make_job: MakeJob, tmp_path: Path, layers: list[str], monkeypatch: pytest.MonkeyPatch
) -> TracedRun:
    """The trace, and when its run began and ended, in microseconds."""
    # However busy this machine is, nobody is relieved in the middle of a step.
    monkeypatch.setattr("swarm_ft.coordinator.decide.losses.MEASURED_AT_LEAST", 1_000)
    # Routes over replicas may change, and a delta without its base would be sent again as a key.
    forward_codec = "aq4" if layers is PIPELINE else "q8"
    job = make_job(
        num_samples=8,
        num_steps=NUM_STEPS,
        batch_size=BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_codec=forward_codec,
        backward_codec="q8",
        dp_codec="q8",
    )
    began_us = 1e6 * time.monotonic()
    shown = Shown(await trace_of(job, tmp_path, layers))
    return shown, began_us, 1e6 * time.monotonic()


async def test_a_trace_shows_where_time_went(run: TracedRun, layers: list[str]) -> None:
    shown, began_us, ended_us = run
    every_microbatch_is_computed_once_at_every_stage(shown, layers)
    slices_of_one_lane_do_not_overlap(shown)
    frames_go_from_peer_to_peer_in_causal_order(shown, layers)
    arrows_follow_the_frames(shown)
    a_peer_waits_when_it_does_not_compute(shown)
    all_times_are_on_the_clock_of_the_coordinator(shown, began_us, ended_us)
    steps_go_from_plan_to_commit(shown, layers)


def every_microbatch_is_computed_once_at_every_stage(shown: Shown, layers: list[str]) -> None:
    def computed(name: str, part: str) -> Counter[tuple[int, int]]:
        events = (e for e in shown.named(name) if shown.layers[e["pid"]] == part)
        return Counter((e["args"]["step"], e["args"]["microbatch"]) for e in events)

    num_microbatches = BATCH_SIZE // MICRO_BATCH_SIZE
    once = Counter((step, index) for step in range(NUM_STEPS) for index in range(num_microbatches))
    for part in layers[:-1]:
        if part != layers[-1]:
            assert computed("forward", part) == once
            assert computed("backward", part) == once
    assert computed("forward + loss + backward", layers[-1]) == once
    assert Counter(e["args"]["step"] for e in shown.named("optimizer")) == {
        step: len(layers) for step in range(NUM_STEPS)
    }
    reduced = len(layers) * NUM_STEPS if layers is REPLICAS else 0
    assert len(shown.named("sum gradients")) == reduced
    assert all(event["args"]["bytes"] > 0 for event in shown.named("sum gradients"))


def slices_of_one_lane_do_not_overlap(shown: Shown) -> None:
    lanes: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in shown.slices:
        lanes[event["pid"], event["tid"]].append(event)
    assert lanes.keys() == shown.lanes.keys()
    for events in lanes.values():
        events.sort(key=lambda event: (event["ts"], end(event)))
        assert all(end(one) <= other["ts"] for one, other in pairwise(events))


def frames_go_from_peer_to_peer_in_causal_order(shown: Shown, layers: list[str]) -> None:
    frames = shown.frames()
    num_boundaries = len(set(layers)) - 1
    assert len(frames) == NUM_STEPS * num_boundaries * 2 * BATCH_SIZE
    computed = {
        (e["pid"], e["args"]["step"], e["args"]["microbatch"], e["name"]): e
        for e in shown.named("forward", "backward", "forward + loss + backward")
    }
    for (step, _, direction, microbatch, _), events in frames.items():
        way = {event["name"]: event for event in events}
        assert len(way) == len(events)
        # In the first traced step, a frame may come before the plan that requests a trace.
        missing = set(WAY) - way.keys()
        assert missing <= ({"receive"} if step == 0 else set())
        sender, receiver = way["send"]["pid"], way["decode"]["pid"]
        assert way["encode"]["pid"] == sender != receiver
        assert end(way["encode"]) <= way["send"]["ts"]
        arrived = way.get("receive", way["decode"])
        assert arrived["pid"] == receiver
        assert way["send"]["ts"] <= arrived["ts"] + 2 * shown.error_us
        assert arrived["ts"] <= way["decode"]["ts"]
        assert len({event["args"]["bytes"] for event in events}) == 1
        both = "forward + loss + backward"
        made = computed.get((sender, step, microbatch, direction))
        made = made or computed[sender, step, microbatch, both]
        assert end(made) <= way["encode"]["ts"]
        used = computed.get((receiver, step, microbatch, direction))
        used = used or computed[receiver, step, microbatch, both]
        assert end(way["decode"]) <= used["ts"]


def arrows_follow_the_frames(shown: Shown) -> None:
    flows: defaultdict[int, list[str]] = defaultdict(list)
    for event in shown.events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event["ph"])
    assert len(flows) == len(shown.frames())
    whole = [phases for phases in flows.values() if sorted(phases) == ["f", "s", "t", "t"]]
    assert len(whole) >= len(flows) * (NUM_STEPS - 1) // NUM_STEPS


def a_peer_waits_when_it_does_not_compute(shown: Shown) -> None:
    for pid in shown.layers:
        busy = [e for e in shown.slices if e["pid"] == pid and shown.lanes[pid, e["tid"]] in LANES]
        busy.sort(key=lambda event: (event["ts"], end(event)))
        for one, other in pairwise(busy):
            assert end(one) <= other["ts"]
        for one, other in pairwise(busy):
            if one["name"] in ("wait for input", "wait for gradient"):
                assert other["args"]["microbatch"] == one["args"]["microbatch"]
                is_gradient = one["name"] == "wait for gradient"
                assert (other["name"] == "backward") == is_gradient
    assert shown.named("wait for input")
    assert shown.named("wait for gradient")
    assert shown.named("wait for commit")


LANES = ("compute", "wait")


def all_times_are_on_the_clock_of_the_coordinator(
    shown: Shown, began_us: float, ended_us: float
) -> None:
    assert shown.error_us < 1e6, "a thousandth of how far the clocks are apart"
    assert min(e["ts"] for e in shown.slices) >= began_us - shown.error_us
    assert max(end(e) for e in shown.slices) <= ended_us + shown.error_us
    offsets = {e["pid"]: e["args"]["clock_offset_us"] for e in shown.named("step")}
    assert len({round(offset / 1e9) for offset in offsets.values()}) == len(offsets)


def steps_go_from_plan_to_commit(shown: Shown, layers: list[str]) -> None:
    steps = shown.named("step")
    assert len(steps) == NUM_STEPS * len(layers)
    moments = [event for event in shown.events if event["ph"] == "i"]
    for step in steps:
        inside = [
            event["name"]
            for event in sorted(moments, key=lambda event: event["ts"])
            if event["pid"] == step["pid"] and event["args"]["step"] == step["args"]["step"]
        ]
        assert inside == ["plan", "ready", "commit"]
        assert step["args"]["attempt"] == 1


async def test_tied_gradients_are_shown(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(num_samples=4, num_steps=2, sync_tied_embeddings=True)
    shown = Shown(await trace_of(job, tmp_path, ["0-3", "3-6"]))
    assert Counter(e["args"]["step"] for e in shown.named("sum tied gradients")) == {0: 2, 1: 2}


async def test_nobody_who_is_not_asked_records_or_sends_anything(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[object] = []
    timelines: list[Timeline] = []

    def noted(kind: Any, message: Any, max_bytes: int) -> bytes:
        messages.append(message)
        return to_bytes(kind, message, max_bytes)

    def remembered(clock: Clock, send: Callable[[FromPeer], None]) -> Timeline:
        timelines.append(Timeline(clock, send))
        return timelines[-1]

    monkeypatch.setattr(memory_transport, "to_bytes", noted)
    monkeypatch.setattr(node, "Timeline", remembered)
    job = make_job(num_samples=4, num_steps=2)
    network = memory_transport.MemoryTransport()
    async with LocalSwarm(tmp_path, ["0-3", "3-6"], transport=network) as swarm:
        await swarm.train(job.spec, job.samples)
        are_on = [timeline.is_on for timeline in timelines]
    plans = [message for message in messages if isinstance(message, PlanStep)]
    assert [plan.traced for plan in plans] == [False] * 4
    assert not [m for m in messages if isinstance(m, StepTimeline | ClockProbe | ClockReply)]
    assert are_on == [False, False]
