"""What is measured: a pipeline's work, the links under it, and what a system did with both.

Times here are those of the machines that are imitated. A lab may run slower by a factor, its
*dilation*: compute and delays take so much longer, links carry so much less, and every ratio
between them stays. Codecs and frameworks do not get slower with it, so their share shrinks; that
is what dilation is for, where eight stages share two cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks.lab import Link


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


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links of all peers alike.

    Attributes:
        up_mbps: None is as fast as this machine.
        delay_ms: of a packet from one peer to another.
    """

    up_mbps: float | None = None
    down_mbps: float | None = None
    delay_ms: float = 0.0

    def link(self, dilation: float = 1.0) -> Link:
        """As the lab is to make it."""
        up, down = (m and m / dilation for m in (self.up_mbps, self.down_mbps))
        return Link(up_mbps=up, down_mbps=down, delay_ms=self.delay_ms * dilation)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a system did.

    Attributes:
        system: its name and setting, for the table.
        dilation: that it ran with.
        step_s: seconds of each step that counts, as imitated: those measured / dilation.
        cpus_used: of this machine, in the mean over those steps.
        notes: by name, whatever else there is to say.
    """

    system: str
    dilation: float
    step_s: tuple[float, ...]
    cpus_used: float
    notes: dict[str, object] = field(default_factory=dict)
