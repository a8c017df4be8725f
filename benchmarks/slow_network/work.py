"""The subject of a measurement: a pipeline's work, its links, and a system's figures.

Times here are those of the machines that are imitated. A lab may run slower by a factor, its
*dilation*: compute and delays take so much longer, links carry so much less, and every ratio
between them stays. Codecs and frameworks do not get slower with it, so their share shrinks; that
is what dilation is for, where eight stages share two cores. Where memory is short a lab may also be
*shrunk*: tensors and what links carry are smaller by one factor, which keeps the ratios too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, combinations, pairwise, product

from benchmarks.lab import QUEUE_MS, Host, Lab, Link
from benchmarks.lab.homes import Home, Internet, Nat


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step of a pipeline.

    Raises:
        ValueError: it is no work.

    Attributes:
        tokens: of a sample.
        channels: of an activation, which is float32 [tokens, channels].
        batch_size: of all replicas together.
        forward_s: seconds of a stage for a microbatch.
        input_backward_s: seconds for the gradient of its input.
        weight_backward_s: seconds for those of its weights.
        replicas: of each stage.
        stage_values: of a stage's gradient, which its replicas sum.
        memory_bytes: of a peer.
        held_bytes: what a microbatch holds at a stage from its forward pass on.
    """

    stages: int
    tokens: int
    channels: int
    batch_size: int
    micro_batch_size: int
    forward_s: float
    input_backward_s: float
    weight_backward_s: float
    replicas: int = 1
    stage_values: int = 1
    memory_bytes: int = 16 << 30
    held_bytes: int = 1

    def __post_init__(self) -> None:
        names = ("tokens", "channels", "batch_size", "micro_batch_size", "replicas")
        if self.stages < 2 or any(getattr(self, name) < 1 for name in names):
            raise ValueError(f"expected 2 stages or more, and 1 or more of all else: {self}")
        if self.batch_size % (self.micro_batch_size * self.replicas):
            raise ValueError(
                f"expected a batch that {self.replicas} replicas share in micro-batches of "
                f"{self.micro_batch_size}, got one of {self.batch_size}"
            )

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a step, at one replica."""
        return self.batch_size // self.micro_batch_size // self.replicas

    @property
    def num_peers(self) -> int:
        """The peers of all stages."""
        return self.stages * self.replicas

    @property
    def microbatch_bytes(self) -> int:
        """The bytes of a microbatch's activation in float32."""
        return 4 * self.micro_batch_size * self.tokens * self.channels

    @property
    def backward_s(self) -> float:
        """Seconds of a whole backward pass."""
        return self.input_backward_s + self.weight_backward_s

    def scaled(self, scale: Scale) -> Work:
        """Scale the work to a lab.

        Raises:
            ValueError: its tensors cannot be shrunk so.
        """
        side = math.isqrt(scale.shrink)
        if side**2 != scale.shrink or self.tokens % side or self.channels % side:
            raise ValueError(
                f"expected to shrink by a square whose root divides {self.tokens} and "
                f"{self.channels}, got {scale.shrink}"
            )
        return replace(
            self,
            tokens=self.tokens // side,
            channels=self.channels // side,
            stage_values=max(1, self.stage_values // scale.shrink),
            forward_s=self.forward_s * scale.dilation,
            input_backward_s=self.input_backward_s * scale.dilation,
            weight_backward_s=self.weight_backward_s * scale.dilation,
        )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The factors between a lab and the machines that it imitates.

    Attributes:
        dilation: how much slower it runs.
        shrink: how much smaller its tensors are, a square.

    Raises:
        ValueError: neither can be so.
    """

    dilation: float = 1.0
    shrink: int = 1

    def __post_init__(self) -> None:
        if self.dilation <= 0 or self.shrink < 1:
            raise ValueError(f"expected a dilation above 0 and to shrink by 1 or more: {self}")


GPT2_XL_V100 = Work(
    stages=8,
    tokens=1024,
    channels=1600,
    batch_size=32,
    micro_batch_size=1,
    forward_s=0.068,
    input_backward_s=0.075,
    weight_backward_s=0.062,
    stage_values=6 * 12 * 1600**2,
    held_bytes=6 * 34 * 1024 * 1600,
)
"""GPT-2-XL on eight V100s, as in AQ-SGD (arXiv 2206.01299, section 4).

The paper's compute-bound rate is 4 sequences a second. With 32 microbatches and 8 stages a step
takes 39 turns of a stage, hence 205 ms a turn; a backward pass takes twice a forward pass. Of its
137 ms, weights take what the products with weights take in the forward pass, which for this shape
is 90 % of it (24 C^2 of 24 C^2 + 4 T C operations a token), and inputs the rest. A V100 has 16 GiB;
a microbatch holds 34 bytes for each value of each block's activation (arXiv 2205.05198, equation 2,
attention scores being computed again).
"""

GPT2_XL_FIVEFOLD = replace(
    GPT2_XL_V100, forward_s=0.014, input_backward_s=0.015, weight_backward_s=0.012
)
"""The same stages on what computes five times as fast, as a consumer's GPU of today does."""
PRESETS = {"gpt2-xl-v100": GPT2_XL_V100, "gpt2-xl-fivefold": GPT2_XL_FIVEFOLD}


class Topology(Enum):
    """The links that a peer's traffic shares."""

    PAIR = "pair"
    """Neighbours have a link of their own, full duplex: what the literature's figures assume."""
    HOME = "home"
    """A peer has one link, whose uplink carries activations and gradients alike."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links, all alike.

    Attributes:
        up_mbps: from a stage to the next (PAIR), or out of a peer (HOME); None is not shaped.
        down_mbps: from a stage to the one before, or into a peer.
        delay_ms: of a packet from one peer to another.
        queue_ms: that it waits at most before it is dropped.
        congestion_control: of TCP.
        idle_restart: see `Lab`.
        nat: what each peer's one link ends at, see `Home`; None: a bridge that all are on.
    """

    up_mbps: float | None = None
    down_mbps: float | None = None
    delay_ms: float = 0.0
    queue_ms: float = QUEUE_MS
    topology: Topology = Topology.PAIR
    congestion_control: str = "cubic"
    idle_restart: bool = True
    nat: Nat | None = None

    def scaled(self, scale: Scale) -> Network:
        """Scale the network to a lab."""
        slower = scale.dilation * scale.shrink
        up, down = (m and m / slower for m in (self.up_mbps, self.down_mbps))
        times = {name: getattr(self, name) * scale.dilation for name in ("delay_ms", "queue_ms")}
        return replace(self, up_mbps=up, down_mbps=down, **times)

    @property
    def home_link(self) -> Link:
        """The link of a peer that has one for all.

        Raises:
            ValueError: there is no such link.
        """
        names = ("up_mbps", "down_mbps", "delay_ms", "queue_ms")
        return Link(**{name: getattr(self, name) for name in names})

    def hosts(self, lab: Lab, work: Work) -> list[list[Host]]:
        """Add hosts to a lab, by stage and replica, and join them by these links."""
        link = self.home_link
        own = link if self.topology is Topology.HOME else Link(delay_ms=self.delay_ms)
        hosts = [[lab.host(own) for _ in range(work.replicas)] for _ in range(work.stages)]
        if self.topology is Topology.PAIR:
            neighbours = (product(near, behind) for near, behind in pairwise(hosts))
            replicas = (combinations(stage, 2) for stage in hosts)
            for pair in chain(*neighbours, *replicas):
                lab.join(*pair, link)
        return hosts

    def homes(self, internet: Internet, work: Work) -> list[list[Host]]:
        """Add homes of one machine each to an internet, by stage and replica."""
        home = Home(self.nat or "open", link=self.home_link)
        return [
            [internet.household(home).machines[0] for _ in range(work.replicas)]
            for _ in range(work.stages)
        ]


def describe_tcp(congestion_control: str, *, idle_restart: bool) -> str:
    """Describe settings that differ from most machines, as an addition to a link's description."""
    control = f", {congestion_control}" * (congestion_control != "cubic")
    return control + ", no idle restart" * (not idle_restart)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The work, network and scale of a measurement, for any system.

    Raises:
        ValueError: it cannot be.

    Attributes:
        steps: that count, after those that begin.
    """

    work: Work
    network: Network
    scale: Scale = field(default_factory=Scale)
    steps: int = 2

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"expected 1 step or more, got {self.steps}")
        _ = self.lab_work, self.network.home_link  # both refuse what cannot be

    @property
    def lab_work(self) -> Work:
        """The work as the lab does it."""
        return self.work.scaled(self.scale)

    @property
    def lab_network(self) -> Network:
        """The network as the lab has it."""
        return self.network.scaled(self.scale)

    def imitated_s(self, lab_s: float) -> float:
        """Convert seconds in the lab to the seconds that they stand for."""
        return lab_s / self.scale.dilation

    def imitated_bytes(self, step_bytes: float) -> float:
        """Convert a lab step's bytes over all boundaries to the imitated bytes of a microbatch."""
        work = self.work
        crossings = work.num_microbatches * work.replicas * (work.stages - 1)
        return step_bytes * self.scale.shrink / crossings


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of a system.

    Attributes:
        system: its name and setting, for the table.
        step_s: seconds of each step that counts, as imitated.
        cpus_used: of this machine, in the mean over those steps.
        forward_bytes: of a microbatch over one boundary, in those steps.
        backward_bytes: so too.
        fill_bytes: of a microbatch that fills the pipeline, forward; None: as all others.
        drain_bytes: of one that drains it, backward; so too.
        gradient_bytes: that each peer sent to the other replicas of its stage in a step.
        notes: other remarks, by name.
    """

    system: str
    step_s: tuple[float, ...]
    cpus_used: float
    forward_bytes: float
    backward_bytes: float
    fill_bytes: float | None = None
    drain_bytes: float | None = None
    gradient_bytes: float = 0.0
    notes: dict[str, object] = field(default_factory=dict)
