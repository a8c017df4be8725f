"""Everything that is known, as Prometheus reads it: base units, and labels that are bounded.

There are no more peers than a page of members holds, no more links of each than it may tell, to
members alone, and no more runs than a page of runs; what a peer says of itself is in
`swarm_ft_peer_info` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarm_ft.page.facts import Facts, Source
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.client import (
    BoundaryStatus,
    Contributor,
    MemberDoing,
    MemberStatus,
    MemberWork,
    RunPhase,
    RunSummary,
    SwarmStatus,
)
from swarm_ft.protocol.messages.events import EventKind

Value = float | None
PEER, LINK, RUN, BOUNDARY = ("peer",), ("peer", "to"), ("run",), ("run", "boundary")
MAX_LABEL = 100
"""Characters of what a peer says of itself."""


class Metrics:
    """See the module's docstring; asked of the facts whenever it is read.

    Args:
        facts: what is known.
        source: whether it plans and commits.
        num_viewers: who looks at the page.
    """

    def __init__(self, facts: Facts, source: Source, num_viewers: Callable[[], int]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Swarm(facts, source, num_viewers))

    def text(self) -> bytes:
        """In Prometheus' own format."""
        return generate_latest(self._registry)


class _Swarm(Collector):
    def __init__(self, facts: Facts, source: Source, num_viewers: Callable[[], int]) -> None:
        self._facts = facts
        self._source = source
        self._num_viewers = num_viewers

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        found = self._facts.status()
        yield from _of_swarm(found)
        yield _of_events(self._source.event_counts)
        yield gauge("ready", "Whether the coordinator plans and commits.", self._source.is_ready)
        yield gauge("page_viewers", "Browsers that show the page.", self._num_viewers())
        yield from _of_runs([run for run in found.runs if not run.phase.is_over])
        yield from _of_boundaries([run for run in found.runs if not run.phase.is_over])
        yield from _of_members(found.members)
        yield from _of_links(found.members)
        yield from _of_contributors(found.contributors)


def gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    """A value without labels."""
    return GaugeMetricFamily(f"swarm_ft_{name}", about, value=float(value))


def gauges(
    name: str, about: str, labels: Sequence[str], values: Iterator[tuple[Sequence[str], Value]]
) -> GaugeMetricFamily:
    """A value for each of some labels; None: not known, and not there."""
    family = GaugeMetricFamily(f"swarm_ft_{name}", about, labels=labels)
    for labelled, value in values:
        if value is not None:
            family.add_metric(labelled, float(value))
    return family


def _of_swarm(found: SwarmStatus) -> Iterator[Metric]:
    version = found.version or "unknown"
    yield gauges("build_info", "The coordinator's version.", ("version",), iter([((version,), 1)]))
    yield gauge("peers", "Peers that are there.", found.num_members)
    counts = {phase.name.lower(): 0 for phase in RunPhase}
    for run in found.runs:
        counts[run.phase.name.lower()] += 1
    words = "Runs by phase, of the newest."
    yield gauges("runs", words, ("phase",), (((name,), n) for name, n in counts.items()))
    relayed = [((relay.name or "coordinator",), relay.links) for relay in found.relays]
    yield gauges("relay_links", "Links over a relay.", ("relay",), iter(relayed))


def _of_events(counts: Mapping[EventKind, int]) -> Metric:
    words = "What happened: what the journal kept as the coordinator started, and all since."
    family = CounterMetricFamily("swarm_ft_events", words, labels=("kind",))
    for kind in EventKind:
        family.add_metric((kind.label,), counts.get(kind, 0))
    return family


RUN_GAUGES: dict[str, tuple[str, Callable[[RunSummary], Value]]] = {
    "run_committed_steps": ("Steps that count.", lambda run: run.committed_steps),
    "run_steps": ("Steps that the run has in all.", lambda run: run.num_steps),
    "run_queue_place": ("Place in the queue; 0: its turn.", lambda run: run.place),
    "run_loss": (
        "Mean loss of the last step.",
        lambda run: run.last_step.loss if run.last_step else None,
    ),
    "run_eval_loss": (
        "Mean loss of the last evaluation.",
        lambda run: run.last_evaluation.loss if run.last_evaluation else None,
    ),
    "run_quality_asked": (
        "Share of the perplexity that compression may cost.",
        lambda run: run.quality.asked if run.quality else None,
    ),
    "run_quality_cost": (
        "Share of the perplexity that compression cost so far.",
        lambda run: run.quality.cost if run.quality and run.quality.num_measured else None,
    ),
    "run_learning_rate": (
        "Of the last step.",
        lambda run: run.last_step.learning_rate if run.last_step else None,
    ),
    "run_grad_norm": (
        "Of the last step, over all stages.",
        lambda run: run.last_step.grad_norm if run.last_step else None,
    ),
    "run_step_seconds": ("That a step took of late.", lambda run: run.step_s or None),
    "run_samples_per_second": ("Trained, of late.", lambda run: run.samples_per_s or None),
    "run_tokens_per_second": ("Target tokens, of late.", lambda run: run.tokens_per_s or None),
    "run_eta_seconds": ("Until its last step, at this pace.", lambda run: run.eta_s),
    "run_sent_bytes": ("Sent, in the steps that count.", lambda run: run.sent.sent_bytes),
    "run_uncompressed_bytes": (
        "The same, had it been sent as it is.",
        lambda run: run.sent.uncompressed_bytes,
    ),
    "run_relayed_bytes": ("Of those sent, over relays.", lambda run: run.sent.relayed_bytes),
    "run_peers": ("Peers that host it.", lambda run: len(run.assignments)),
}


def _of_runs(runs: Sequence[RunSummary]) -> Iterator[Metric]:
    for name, (about, value) in RUN_GAUGES.items():
        yield gauges(name, about, RUN, (((run.run_id,), value(run)) for run in runs))


BOUNDARY_GAUGES: dict[str, tuple[str, Callable[[BoundaryStatus], Value]]] = {
    "boundary_key_frames": ("Frames that built on nothing.", lambda one: one.key_frames),
    "boundary_delta_frames": ("Frames that built on a buffer.", lambda one: one.delta_frames),
    "boundary_hit_ratio": (
        "Of frames that could build on a buffer, those that did.",
        lambda one: one.hit_rate,
    ),
    "boundary_compression_ratio": ("Plain bytes to those sent.", lambda one: one.ratio),
    "boundary_buffered_samples": (
        "Whose buffers are at both ends.",
        lambda one: one.buffered_samples,
    ),
    "boundary_buffer_memory_bytes": (
        "That buffers take, at all peers.",
        lambda one: one.kept.memory_bytes,
    ),
    "boundary_buffer_disk_bytes": ("So too on disk.", lambda one: one.kept.disk_bytes),
}


def _of_boundaries(runs: Sequence[RunSummary]) -> Iterator[Metric]:
    found = [
        ((run.run_id, str(boundary.boundary)), boundary)
        for run in runs
        for boundary in run.boundaries
    ]
    for name, (about, value) in BOUNDARY_GAUGES.items():
        yield gauges(name, about, BOUNDARY, ((labels, value(one)) for labels, one in found))


MEMBER_GAUGES: dict[str, tuple[str, Callable[[MemberStatus], Value]]] = {
    "peer_memory_bytes": ("That it lends.", lambda m: m.memory_bytes),
    "peer_heard_ago_seconds": ("Since it last said something.", lambda m: m.heard_ago_s),
    "peer_joined_ago_seconds": ("Since it joined.", lambda m: m.joined_ago_s),
    "peer_up_bytes_per_second": (
        "To the coordinator, as measured.",
        lambda m: m.machine.up_bytes_per_s or None,
    ),
    "peer_down_bytes_per_second": (
        "From there, as measured.",
        lambda m: m.machine.down_bytes_per_s or None,
    ),
    "peer_round_trip_seconds": ("There and back.", lambda m: m.machine.round_trip_s or None),
    "peer_microbatch_seconds": (
        "That a microbatch takes it to compute, of late.",
        lambda m: max((work.microbatch_s or 0.0 for work in m.works), default=0.0) or None,
    ),
    "peer_share": (
        "Microbatches of the step under way that are its own.",
        lambda m: sum(work.share for work in m.works) if m.works else None,
    ),
    "peer_waits": (
        "Whether it waits for others, in all that it does.",
        lambda m: all(w.doing is MemberDoing.WAITING for w in m.works) if m.works else None,
    ),
}
INFO = ("peer", "device", "version", "run", "stage", "layers")


def _of_members(members: Sequence[MemberStatus]) -> Iterator[Metric]:
    info = ((_info(m, work), 1.0) for m in members for work in m.works or (None,))
    yield gauges("peer_info", "What a peer is, and hosts.", INFO, info)
    for name, (about, value) in MEMBER_GAUGES.items():
        yield gauges(name, about, PEER, (((m.peer_id,), value(m)) for m in members))


def _info(member: MemberStatus, work: MemberWork | None) -> tuple[str, ...]:
    hosts = (work.run_id, str(work.stage), str(work.layers)) if work else ("", "", "")
    return member.peer_id, member.device[:MAX_LABEL], member.version[:MAX_LABEL], *hosts


LINK_GAUGES: dict[str, tuple[str, Callable[[LinkSpeed], Value]]] = {
    "link_bytes_per_second": (
        "That the link lets through, from peer to the other, while it is full.",
        lambda s: s.bytes_per_s or None,
    ),
    "link_peak_bytes_per_second": ("The most of late.", lambda s: s.peak_bytes_per_s or None),
    "link_round_trip_seconds": (
        "There and back, with what is in the way.",
        lambda s: s.round_trip_s or None,
    ),
    "link_least_round_trip_seconds": ("The least of late.", lambda s: s.least_round_trip_s or None),
}


def _of_links(members: Sequence[MemberStatus]) -> Iterator[Metric]:
    found = [((m.peer_id, link.peer_id), link.speed) for m in members for link in m.links]
    for name, (about, value) in LINK_GAUGES.items():
        yield gauges(name, about, LINK, ((labels, value(speed)) for labels, speed in found))


CONTRIBUTED: dict[str, tuple[str, Callable[[Contributor], float]]] = {
    "peer_samples": ("That passed it in committed steps.", lambda one: one.given.samples),
    "peer_steps": ("Committed with it.", lambda one: one.given.steps),
    "peer_step_seconds": ("That these took.", lambda one: one.given.seconds),
    "peer_compute_seconds": ("Of these, at work.", lambda one: one.given.compute_s),
    "peer_sent_bytes": ("Of activations and gradients.", lambda one: one.given.sent_bytes),
    "peer_all_sent_bytes": ("Of everything to other members.", lambda one: one.given.all_bytes),
}


def _of_contributors(contributors: Sequence[Contributor]) -> Iterator[Metric]:
    for name, (about, value) in CONTRIBUTED.items():
        family = CounterMetricFamily(f"swarm_ft_{name}", about, labels=PEER)
        for one in contributors:
            family.add_metric((one.peer_id,), value(one))
        yield family
