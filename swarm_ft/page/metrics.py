"""Metrics of the swarm for Prometheus, in base units, with bounded labels.

There are no more peers than on a page of members, no more links than a peer may report, to members
alone, and no more runs than on a page of runs. Texts from a peer appear in `swarm_ft_peer_info`
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarm_ft.page.status_cache import StatusCache, StatusSource
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.client import (
    BoundaryStatus,
    Contributor,
    MemberActivity,
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
"""Characters of a text from a peer."""


class Metrics:
    """Metrics of the swarm, which read the status at each scrape.

    Args:
        facts: Status of the swarm.
        source: The coordinator.
        num_viewers: Returns the number of the page's viewers.
    """

    def __init__(
        self, facts: StatusCache, source: StatusSource, num_viewers: Callable[[], int]
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Swarm(facts, source, num_viewers))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' own format."""
        return generate_latest(self._registry)


class _Swarm(Collector):
    def __init__(
        self, facts: StatusCache, source: StatusSource, num_viewers: Callable[[], int]
    ) -> None:
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
    """Return a gauge without labels."""
    return GaugeMetricFamily(f"swarm_ft_{name}", about, value=float(value))


def gauges(
    name: str, about: str, labels: Sequence[str], values: Iterator[tuple[Sequence[str], Value]]
) -> GaugeMetricFamily:
    """Return a gauge with a value for each set of labels; None leaves a value out."""
    family = GaugeMetricFamily(f"swarm_ft_{name}", about, labels=labels)
    for labelled, value in values:
        if value is not None:
            family.add_metric(labelled, float(value))
    return family


def _of_swarm(found: SwarmStatus) -> Iterator[Metric]:
    version = found.version or "unknown"
    yield gauges("build_info", "The coordinator's version.", ("version",), iter([((version,), 1)]))
    yield gauge("peers", "Peers with a connection to the coordinator.", found.num_members)
    counts = {phase.name.lower(): 0 for phase in RunPhase}
    for run in found.runs:
        counts[run.phase.name.lower()] += 1
    about = "Runs by phase, of the newest."
    yield gauges("runs", about, ("phase",), (((name,), n) for name, n in counts.items()))
    relayed = [((relay.name or "coordinator",), relay.links) for relay in found.relays]
    yield gauges("relay_links", "Links over a relay.", ("relay",), iter(relayed))


def _of_events(counts: Mapping[EventKind, int]) -> Metric:
    about = "Events by kind: those in the journal at the coordinator's start, and all since."
    family = CounterMetricFamily("swarm_ft_events", about, labels=("kind",))
    for kind in EventKind:
        family.add_metric((kind.label,), counts.get(kind, 0))
    return family


RUN_GAUGES: dict[str, tuple[str, Callable[[RunSummary], Value]]] = {
    "run_committed_steps": ("Committed steps.", lambda run: run.committed_steps),
    "run_steps": ("Steps of the run in all.", lambda run: run.num_steps),
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
        "Share of the perplexity that compression may cost, as configured.",
        lambda run: run.quality.asked if run.quality else None,
    ),
    "run_quality_cost": (
        "Share of the perplexity that compression has cost so far.",
        lambda run: run.quality.cost if run.quality and run.quality.num_measured else None,
    ),
    "run_learning_rate": (
        "Learning rate of the last step.",
        lambda run: run.last_step.learning_rate if run.last_step else None,
    ),
    "run_grad_norm": (
        "Gradient norm of the last step, over all stages.",
        lambda run: run.last_step.grad_norm if run.last_step else None,
    ),
    "run_step_seconds": ("Seconds of a recent step.", lambda run: run.step_s or None),
    "run_samples_per_second": (
        "Samples per second of late.",
        lambda run: run.samples_per_s or None,
    ),
    "run_tokens_per_second": (
        "Target tokens per second of late.",
        lambda run: run.tokens_per_s or None,
    ),
    "run_eta_seconds": ("Seconds until the last step, at this pace.", lambda run: run.eta_s),
    "run_sent_bytes": ("Bytes sent in committed steps.", lambda run: run.sent.sent_bytes),
    "run_uncompressed_bytes": (
        "Bytes of the same data without compression.",
        lambda run: run.sent.uncompressed_bytes,
    ),
    "run_relayed_bytes": ("Sent bytes that passed relays.", lambda run: run.sent.relayed_bytes),
    "run_peers": ("Peers that host it.", lambda run: len(run.assignments)),
}


def _of_runs(runs: Sequence[RunSummary]) -> Iterator[Metric]:
    for name, (about, value) in RUN_GAUGES.items():
        yield gauges(name, about, RUN, (((run.run_id,), value(run)) for run in runs))


BOUNDARY_GAUGES: dict[str, tuple[str, Callable[[BoundaryStatus], Value]]] = {
    "boundary_key_frames": ("Key frames, which need no buffer.", lambda one: one.key_frames),
    "boundary_delta_frames": ("Delta frames, which need a buffer.", lambda one: one.delta_frames),
    "boundary_hit_ratio": (
        "Share of delta frames among frames that could be one.",
        lambda one: one.hit_rate,
    ),
    "boundary_compression_ratio": ("Plain bytes per sent byte.", lambda one: one.ratio),
    "boundary_buffered_samples": (
        "Samples with buffers at both ends.",
        lambda one: one.buffered_samples,
    ),
    "boundary_buffer_memory_bytes": (
        "Memory of the buffers, at all peers.",
        lambda one: one.kept.memory_bytes,
    ),
    "boundary_buffer_disk_bytes": (
        "Disk space of the buffers, at all peers.",
        lambda one: one.kept.disk_bytes,
    ),
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
    "peer_memory_bytes": ("Memory that the peer lends.", lambda m: m.memory_bytes),
    "peer_heard_ago_seconds": ("Seconds since its last message.", lambda m: m.heard_ago_s),
    "peer_joined_ago_seconds": ("Seconds since it joined.", lambda m: m.joined_ago_s),
    "peer_up_bytes_per_second": (
        "Measured rate to the coordinator.",
        lambda m: m.machine.up_bytes_per_s or None,
    ),
    "peer_down_bytes_per_second": (
        "Measured rate from the coordinator.",
        lambda m: m.machine.down_bytes_per_s or None,
    ),
    "peer_round_trip_seconds": (
        "Round trip to the coordinator.",
        lambda m: m.machine.round_trip_s or None,
    ),
    "peer_microbatch_seconds": (
        "Computing time of a recent microbatch.",
        lambda m: max((work.microbatch_s or 0.0 for work in m.works), default=0.0) or None,
    ),
    "peer_share": (
        "Microbatches of the step under way that are assigned to it.",
        lambda m: sum(work.share for work in m.works) if m.works else None,
    ),
    "peer_waits": (
        "Whether all of its stages wait for others.",
        lambda m: all(w.doing is MemberActivity.WAITING for w in m.works) if m.works else None,
    ),
}
INFO = ("peer", "device", "version", "run", "stage", "layers")


def _of_members(members: Sequence[MemberStatus]) -> Iterator[Metric]:
    info = ((_info(m, work), 1.0) for m in members for work in m.works or (None,))
    yield gauges(
        "peer_info", "Device and version of a peer, and a stage that it hosts.", INFO, info
    )
    for name, (about, value) in MEMBER_GAUGES.items():
        yield gauges(name, about, PEER, (((m.peer_id,), value(m)) for m in members))


def _info(member: MemberStatus, work: MemberWork | None) -> tuple[str, ...]:
    hosts = (work.run_id, str(work.stage), str(work.layers)) if work else ("", "", "")
    return member.peer_id, member.device[:MAX_LABEL], member.version[:MAX_LABEL], *hosts


LINK_GAUGES: dict[str, tuple[str, Callable[[LinkSpeed], Value]]] = {
    "link_bytes_per_second": (
        "Rate of the link from the peer to the other one while it is full.",
        lambda s: s.bytes_per_s or None,
    ),
    "link_peak_bytes_per_second": (
        "Highest rate of late.",
        lambda s: s.peak_bytes_per_s or None,
    ),
    "link_round_trip_seconds": (
        "Round trip, with the time in queues.",
        lambda s: s.round_trip_s or None,
    ),
    "link_least_round_trip_seconds": (
        "Shortest round trip of late.",
        lambda s: s.least_round_trip_s or None,
    ),
}


def _of_links(members: Sequence[MemberStatus]) -> Iterator[Metric]:
    found = [((m.peer_id, link.peer_id), link.speed) for m in members for link in m.links]
    for name, (about, value) in LINK_GAUGES.items():
        yield gauges(name, about, LINK, ((labels, value(speed)) for labels, speed in found))


CONTRIBUTED: dict[str, tuple[str, Callable[[Contributor], float]]] = {
    "peer_samples": ("Samples that it computed in committed steps.", lambda one: one.given.samples),
    "peer_steps": ("Committed steps with it.", lambda one: one.given.steps),
    "peer_step_seconds": ("Seconds of these steps.", lambda one: one.given.seconds),
    "peer_compute_seconds": (
        "Seconds of computing in these steps.",
        lambda one: one.given.compute_s,
    ),
    "peer_sent_bytes": (
        "Bytes of activations and gradients that it sent.",
        lambda one: one.given.sent_bytes,
    ),
    "peer_all_sent_bytes": (
        "Bytes that it sent to other members in all.",
        lambda one: one.given.all_bytes,
    ),
}


def _of_contributors(contributors: Sequence[Contributor]) -> Iterator[Metric]:
    for name, (about, value) in CONTRIBUTED.items():
        family = CounterMetricFamily(f"swarm_ft_{name}", about, labels=PEER)
        for one in contributors:
            family.add_metric((one.peer_id,), value(one))
        yield family
