"""The work of a peer, as its volunteer sees it."""

from dataclasses import replace

from swarm_ft.ids import Attempt, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.peer.current_work import CurrentWork, RunWork
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


def test_what_it_does_is_told_from_its_stage_until_it_is_released() -> None:
    work, run = CurrentWork(PeerId("b")), assign("a", "b")
    work.on_assign(run)
    hosting = RunWork(
        run_id=RUN, layers=LayerRange(0, 2), step=0, num_steps=run.spec.train.num_steps
    )
    assert work.runs == (hosting,)
    work.on_plan(plan(0, 0, 1, 1))
    assert work.runs == (replace(hosting, samples=4, batch=6),)
    work.on_commit(commit(0))
    assert work.runs == (replace(hosting, step=1, samples=4, batch=6),)
    work.on_assign(run)
    assert work.runs == (replace(hosting, samples=4, batch=6),), "back to the start"
    work.on_release(RUN)
    assert not work.runs


def test_it_may_work_for_several_runs_and_hosts_until_the_last_is_released() -> None:
    work, run = CurrentWork(PeerId("b")), assign("a", "b")
    other = replace(run, run_id=RunId("other"))
    work.on_assign(run)
    work.on_assign(other)
    work.on_plan(replace(plan(0, 1), run_id=other.run_id))
    work.on_plan(plan(0, 1, 1))
    work.on_commit(commit(0))
    work.on_commit(replace(commit(0), run_id=other.run_id))
    assert [(one.run_id, one.step, one.samples) for one in work.runs] == [
        (RUN, 1, 4),
        ("other", 1, 2),
    ]
    work.on_release(RUN)
    assert [one.run_id for one in work.runs] == ["other"]
    work.on_release(other.run_id)
    assert not work.runs
