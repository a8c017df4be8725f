"""What a peer counts of its own gifts."""

from dataclasses import replace

from swarm_ft.ids import Attempt, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.peer.given import Doing, Gift, Given
from swarm_ft.protocol.messages.control import Assign, CommitStep, PlanStep, StageAssignment
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.microbatch import Microbatch
from tests.specs import run_spec

RUN = RunId("run")


def assign(*peers: str) -> Assign:
    spec, layers = run_spec(), LayerRange(0, 2)
    assignments = tuple(StageAssignment(peer_id=PeerId(p), layers=layers) for p in peers)
    return Assign(
        run_id=RUN,
        spec=spec,
        attempt=Attempt(1),
        assignments=assignments,
        committed_steps=0,
        fresh=True,
        spec_digest=spec.digest(),
    )


def plan(step: int, *replicas: int) -> PlanStep:
    """A microbatch of two samples for each of these."""
    batches = tuple(
        Microbatch(
            index=MicrobatchIndex(i),
            samples=(SampleId(2 * i), SampleId(2 * i + 1)),
            route=(replica,),
        )
        for i, replica in enumerate(replicas)
    )
    return PlanStep(run_id=RUN, attempt=Attempt(1), step=StepNumber(step), microbatches=batches)


def commit(step: int) -> CommitStep:
    return CommitStep(
        run_id=RUN, attempt=Attempt(1), step=StepNumber(step), clip_factor=1.0, learning_rate=0.1
    )


def test_only_what_was_committed_counts_once_and_only_its_own_part() -> None:
    given = Given(PeerId("b"))
    given.assigned(assign("a", "b"), 10.0)
    given.planned(plan(0, 0, 1, 1))
    given.planned(plan(0, 0, 1, 1))  # planned again: it counts once
    given.committed(commit(0))
    given.committed(commit(0))
    given.planned(plan(1, 1, 1, 1))
    assert given.gift(100.0, 5) == Gift(hosted_s=90.0, steps=1, samples=4, sent_bytes=5)
    given.released(RUN, 110.0)
    assert given.gift(500.0, 5).hosted_s == 100.0


def test_its_last_words() -> None:
    gift = Gift(hosted_s=7380.0, steps=1600, samples=25600, sent_bytes=1_234_000_000)
    assert gift.in_words == "2 h 3 min, 1,600 steps, 25,600 samples and sent 1.2 GB"
    assert Gift(hosted_s=300.0, steps=1, samples=4).in_words == "5 min, 1 steps, 4 samples"
    assert Gift(hosted_s=9.0).in_words.startswith("9 s")


def test_what_it_does_is_told_from_its_stage_until_it_is_released() -> None:
    given, run = Given(PeerId("b")), assign("a", "b")
    given.assigned(run, 10.0)
    hosting = Doing(run_id=RUN, layers=LayerRange(0, 2), step=0, num_steps=run.spec.train.num_steps)
    assert given.doing == (hosting,)
    given.planned(plan(0, 0, 1, 1))
    assert given.doing == (replace(hosting, samples=4, batch=6),)
    given.committed(commit(0))
    assert given.doing == (replace(hosting, step=1, samples=4, batch=6),)
    given.assigned(run, 20.0)
    assert given.doing == (replace(hosting, samples=4, batch=6),), "back to the start"
    given.released(RUN, 30.0)
    assert not given.doing


def test_it_may_work_for_several_runs_and_hosts_until_the_last_is_released() -> None:
    given, run = Given(PeerId("b")), assign("a", "b")
    other = replace(run, run_id=RunId("other"))
    given.assigned(run, 10.0)
    given.assigned(other, 20.0)
    given.planned(replace(plan(0, 1), run_id=other.run_id))
    given.planned(plan(0, 1, 1))
    given.committed(commit(0))
    given.committed(replace(commit(0), run_id=other.run_id))
    assert [(one.run_id, one.step, one.samples) for one in given.doing] == [
        (RUN, 1, 4),
        ("other", 1, 2),
    ]
    given.released(RUN, 30.0)
    assert [one.run_id for one in given.doing] == ["other"]
    given.released(other.run_id, 50.0)
    assert given.gift(99.0, 0) == Gift(hosted_s=40.0, steps=2, samples=6)
