"""Whole swarms on virtual time in which layers move while a run trains."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec
from tests.simulation.engine import MODULUS
from tests.simulation.scenario import COORDINATOR, Fault, FaultKind, Moment, Scenario
from tests.simulation.simulate import Outcome, simulate

pytestmark = pytest.mark.timeout(400)  # tens of thousands of events each

NUM_BLOCKS, NUM_STEPS = 9, 26
SLOW = Fault(
    kind=FaultKind.SLOW, at_s=SETTLE_S + 6.0, duration_s=2000.0, machine="peer-1", amount=0.4
)
"""Twenty-one times as slow as the others, until the run is over."""
FAST = Fault(kind=FaultKind.JOIN, at_s=12.0, duration_s=1.0, machine="peer-new", other="auto")


def spec_of() -> RunSpec:
    """Blocks so large that replicas would sum them for seconds, were they what they claim to be."""
    fields: dict[str, Any] = {
        "num_samples": 14,
        "seq_length": 2,
        "batch_size": 4,
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
            nonce=bytes(16),
            tied_embeddings=False,
        ),
        train=TrainSpec(**fields),
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


WAITS, MOVED = "waiting for a snapshot before layers move", "a step is expected to take"


def logged_at_s(outcome: Outcome, phase: str, words: str) -> list[float]:
    """Return the times at which the coordinator logged these words about the run."""
    lines = (line for line in outcome.lines if f": {phase}: " in line and words in line)
    return [float(line.split()[0]) for line in lines]


@cache
def slowed(*, peers_keep: bool = True) -> Outcome:
    return simulate(scenario(SLOW, peers_keep=peers_keep), keep_trace=True)


@pytest.mark.parametrize("peers_keep", [True, False], ids=["keepers", "one place"])
@pytest.mark.sampled(2)
def test_a_peer_that_gets_slow_gives_layers_away_once(peers_keep: bool) -> None:
    outcome = slowed(peers_keep=peers_keep)
    assert outcome.failures == ()
    assert outcome.num_commits == NUM_STEPS, "no step was made again"
    assert len(logged_at_s(outcome, "waiting", MOVED)) == 1


@pytest.mark.slow
def test_a_fast_peer_that_joins_gets_layers_once() -> None:
    """All others are slow from the beginning on."""
    slow = replace(SLOW, at_s=0.5, amount=0.1)
    others = [replace(slow, machine=f"peer-{number}") for number in range(3)]
    outcome = simulate(scenario(*others, FAST), keep_trace=True)
    assert outcome.failures == ()
    assert outcome.num_commits == NUM_STEPS
    (at_s,) = logged_at_s(outcome, "waiting", MOVED)
    assert at_s > FAST.at_s


@pytest.mark.slow
def test_nothing_moves_where_all_is_as_it_was() -> None:
    outcome = simulate(scenario(), keep_trace=True)
    assert outcome.failures == ()
    assert outcome.num_commits == NUM_STEPS
    assert not logged_at_s(outcome, "training", WAITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "machine"),
    [
        (Moment.COPIED, "peer-0"),
        (Moment.COPIED, COORDINATOR),
        (Moment.LOADED, "peer-1"),
        (Moment.TAKEN_OVER, COORDINATOR),
    ],
)
def test_whoever_is_killed_while_layers_move_no_step_counts_twice(
    moment: Moment, machine: str
) -> None:
    """The kill comes at the first such moment after the run waits for its snapshot."""
    (at_s,) = logged_at_s(slowed(), "training", WAITS)
    killed = Fault(kind=FaultKind.CRASH, at_s=at_s, duration_s=1.5, machine=machine, moment=moment)
    outcome = simulate(scenario(SLOW, killed), keep_trace=True)
    assert outcome.failures == ()
    assert outcome.faults["crash"] == 1
    assert len(logged_at_s(outcome, "waiting", MOVED)) <= 2
