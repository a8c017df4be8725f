"""Whole swarms on virtual time in which layers move while a run trains."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec
from tests.simulation.engine import MODULUS
from tests.simulation.scenario import COORDINATOR, Fault, FaultKind, Moment, Scenario
from tests.simulation.simulate import Outcome, simulate

NUM_BLOCKS, NUM_STEPS = 9, 120
SLOW = Fault(
    kind=FaultKind.SLOW, at_s=SETTLE_S + 10.0, duration_s=2000.0, machine="peer-1", amount=0.12
)
"""Seven times as slow as the others, until the run is over."""
FAST = Fault(kind=FaultKind.JOIN, at_s=12.0, duration_s=1.0, machine="peer-new", other="auto")


def spec_of(**train: object) -> RunSpec:
    """Blocks so large that replicas would sum them for seconds, were they what they claim to be."""
    fields: dict[str, object] = {
        "num_samples": 14,
        "seq_length": 2,
        "batch_size": 8,
        "micro_batch_size": 2,
        "num_steps": NUM_STEPS,
        "learning_rate": 0.5,
        "lr_schedule": LrSchedule.LINEAR,
        "seed": 3,
        "shuffle": True,
        "forward_codec": "aq8t",
        "backward_codec": "q8",
        "key_codec": "fp16",
    }
    return RunSpec(
        model=ModelSpec(
            reference="tiny",
            architecture="tiny",
            num_blocks=NUM_BLOCKS,
            hidden_size=4,
            vocab_size=2 * MODULUS,
            block_bytes=4 << 20,
            embed_digest=bytes(16),
            block_digests=(bytes(16),) * NUM_BLOCKS,
            head_digest=bytes(16),
            tied_embeddings=False,
        ),
        train=TrainSpec(**fields | train),  # type: ignore[arg-type] - of many types
    )


def scenario(
    *faults: Fault, peers_keep: bool = True, seed: int = 1, num_peers: int = 3
) -> Scenario:
    return Scenario(
        seed=seed,
        spec=spec_of(),
        layers=("auto",) * num_peers,
        faults=faults,
        window_messages=64,
        mean_compute_s=0.02,
        peers_keep=peers_keep,
        computes_by_block=True,
    )


def told(outcome: Outcome, words: str) -> list[float]:
    """When the coordinator told of it; a detail that it repeats counts once."""
    found = [line for line in outcome.lines if words in line and " waiting " in line]
    return [float(line.split()[0]) for line in found]


MOVED = "a step is expected to take"


@cache
def slowed(*, peers_keep: bool = True) -> Outcome:
    return simulate(scenario(SLOW, peers_keep=peers_keep), keep_trace=True)


@pytest.mark.parametrize("peers_keep", [True, False], ids=["keepers", "one place"])
def test_a_peer_that_gets_slow_gives_layers_away_once(peers_keep: bool) -> None:
    outcome = slowed(peers_keep=peers_keep)
    assert outcome.failures == ()
    assert outcome.num_commits == NUM_STEPS, "no step was made again"
    assert len(told(outcome, MOVED)) == 1
