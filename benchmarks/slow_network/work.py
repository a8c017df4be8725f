"""What is measured: a pipeline's work, the links under it, and what a system did with both.

Times here are those of the machines that are imitated. A lab may run slower by a factor, its
*dilation*: compute and delays take so much longer, links carry so much less, and every ratio
between them stays. Codecs and frameworks do not get slower with it, so their share shrinks; that
is what dilation is for, where eight stages share two cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import combinations, pairwise, product

from benchmarks.lab import Host, Lab, Link


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step of a pipeline.

    Attributes:
        tokens: of a sample.
        channels: of an activation, which is float32 [tokens, channels].
        forward_s: seconds of a stage for a microbatch.
        input_backward_s: seconds for the gradient of its input.
        weight_backward_s: seconds for those of its weights.
    """

    stages: int
    tokens: int
    channels: int
    batch_size: int
    micro_batch_size: int
    forward_s: float
    input_backward_s: float
    weight_backward_s: float

    @property
    def num_microbatches(self) -> int:
        """Of a step."""
        return self.batch_size // self.micro_batch_size

    @property
    def microbatch_bytes(self) -> int:
        """Of its activation in float32."""
        return 4 * self.micro_batch_size * self.tokens * self.channels

    @property
    def backward_s(self) -> float:
        """Seconds of a whole backward pass."""
        return self.input_backward_s + self.weight_backward_s

    def dilated(self, dilation: float) -> Work:
        """The same, slower."""
        return replace(
            self,
            forward_s=self.forward_s * dilation,
            input_backward_s=self.input_backward_s * dilation,
            weight_backward_s=self.weight_backward_s * dilation,
        )


GPT2_XL_V100 = Work(
    stages=8,
    tokens=1024,
    channels=1600,
    batch_size=32,
    micro_batch_size=1,
    forward_s=0.068,
    input_backward_s=0.075,
    weight_backward_s=0.062,
)
"""GPT-2-XL on eight V100s, as in AQ-SGD (arXiv 2206.01299, section 4).

The paper's compute-bound rate is 4 sequences a second. With 32 microbatches and 8 stages a step
takes 39 turns of a stage, hence 205 ms a turn; a backward pass takes twice a forward pass. Of its
137 ms, weights take what the products with weights take in the forward pass, which for this shape
is 90 % of it (24 C^2 of 24 C^2 + 4 T C operations a token), and inputs the rest.
"""

PRESETS = {"gpt2-xl-v100": GPT2_XL_V100}


class Topology(Enum):
    """What a peer's traffic shares."""

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
    """

    up_mbps: float | None = None
    down_mbps: float | None = None
    delay_ms: float = 0.0
    topology: Topology = Topology.PAIR

    def link(self, dilation: float = 1.0) -> Link:
        """As the lab is to make it."""
        up, down = (m and m / dilation for m in (self.up_mbps, self.down_mbps))
        return Link(up_mbps=up, down_mbps=down, delay_ms=self.delay_ms * dilation)

    def hosts(
        self, lab: Lab, stages: int, *, replicas: int = 1, dilation: float = 1.0
    ) -> list[list[Host]]:
        """New hosts in a lab, by stage and replica, joined by these links."""
        link = self.link(dilation)
        if self.topology is Topology.HOME:
            return [[lab.host(link) for _ in range(replicas)] for _ in range(stages)]
        away = Link(delay_ms=link.delay_ms)
        hosts = [[lab.host(away) for _ in range(replicas)] for _ in range(stages)]
        for here, behind in pairwise(hosts):
            for pair in product(here, behind):
                lab.join(*pair, link)
        for stage in hosts:
            for pair in combinations(stage, 2):
                lab.join(*pair, link)
        return hosts


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is to be measured, of whatever system.

    Attributes:
        dilation: how much slower the lab runs than what it imitates.
        steps: that count, after those that begin.
    """

    work: Work
    network: Network
    dilation: float = 1.0
    steps: int = 2

    @property
    def crossings(self) -> int:
        """Of boundaries by microbatches in a step, one way."""
        return self.work.num_microbatches * (self.work.stages - 1)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a system did.

    Attributes:
        system: its name and setting, for the table.
        dilation: that it ran with.
        step_s: seconds of each step that counts, as imitated: those measured / dilation.
        cpus_used: of this machine, in the mean over those steps.
        forward_bytes: of a microbatch over one boundary, in those steps.
        backward_bytes: so too.
        notes: by name, whatever else there is to say.
    """

    system: str
    dilation: float
    step_s: tuple[float, ...]
    cpus_used: float
    forward_bytes: float
    backward_bytes: float
    notes: dict[str, object] = field(default_factory=dict)
