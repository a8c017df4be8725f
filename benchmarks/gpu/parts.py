"""The parts, the most important first, and the inputs of each. It imports none of them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu import needs
from benchmarks.gpu.needs import Need
from benchmarks.gpu.report import Row

END = "end"
"""The key of the last line that a part's process prints: empty if all is done, else why not."""
LIMIT_S = 480.0
SPARE_S, SPARE_SHARE = 20.0, 0.1
"""Before its time is up a part begins nothing new: so long, or that share of its time at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The inputs of a part.

    Attributes:
        rehearse: small shapes, on a CPU if there is no GPU: that all of it runs, no figures.
        end_s: monotonic seconds at which it is cut off.
        spare_s: before that it begins nothing new.
        rates_mbps: of links, in place of a part's own; 0: not paced.
        pairs: of codecs that swarms train by, the default first; 0: all.
    """

    rehearse: bool
    end_s: float
    spare_s: float = 0.0
    rates_mbps: Sequence[float] = ()
    pairs: int = 0

    @property
    def left_s(self) -> float:
        """Seconds in which something new may still be begun and ended."""
        return self.end_s - self.spare_s - time.monotonic()


@dataclass(frozen=True, slots=True)
class Part:
    """One of them.

    Attributes:
        needs: modules without which it cannot begin.
        module: of this package, whose `function` yields what it finds.
    """

    name: str
    title: str
    needs: tuple[Need, ...]
    module: str
    function: str = "rows"
    limit_s: float = LIMIT_S

    def rows(self, scene: Scene) -> Iterator[Row]:
        """Run it here."""
        found = importlib.import_module(f"benchmarks.gpu.{self.module}")
        run: Callable[[Scene], Iterator[Row]] = getattr(found, self.function)
        return run(scene)


PARTS = (
    Part("conformance", "kernels and codecs to the bit", needs.CODECS, "conformance"),
    Part("codec", "codecs beside a copy of the same tensor", needs.CODECS, "speed"),
    Part("parity", "stages beside plain autograd", needs.MODELS, "parity"),
    Part("swarm", "GPT-2 XL in 8 processes over paced links", needs.SWARM, "swarm"),
    Part("llama", "Llama-3-8B with adapters, likewise", needs.SWARM, "swarm", "adapter_rows"),
    Part("quality", "a model trained through codecs", needs.MODELS, "quality"),
    Part("memory", "forecasts beside what was allocated", needs.MODELS, "memory"),
    Part("engine", "what a stage's microbatch waits for", needs.MODELS, "engine"),
    Part("swarm-4", "GPT-2 XL in 4 processes", needs.SWARM, "swarm", "rows_of_4"),
    Part("llama-4", "Llama-3-8B in 4 processes", needs.SWARM, "swarm", "adapter_rows_of_4"),
    Part("tune", "tiles and warps of kernels that pack", needs.CODECS, "tune"),
)
BY_NAME = {part.name: part for part in PARTS}
