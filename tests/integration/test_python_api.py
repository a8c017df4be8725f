"""`swarm_ft` as a program has it: a swarm here, and the three roles over real DHT, TLS and gRPC."""

import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import swarm_ft
from swarm_ft.api.keywords import JobKeywords
from swarm_ft.client.demo_input import DemoInput, write_demo_input
from swarm_ft.errors import BadInvite, BadOption, NotFound, OutOfTurn, RunFailed
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted

QUICK: JobKeywords = {
    "epochs": 1,
    "batch_size": 4,
    "seq_length": 32,
    "max_samples": 12,
    "lr_schedule": "constant",
}


def quick(sample: DemoInput, out: Path) -> JobKeywords:
    return {**QUICK, "model": sample.model_dir, "dataset": sample.train_file, "out": out}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> DemoInput:
    return write_demo_input(tmp_path_factory.mktemp("sample"), seed=1, num_layers=4, hidden_size=32)


def test_a_notebook_trains_in_a_few_lines(tmp_path: Path) -> None:
    with swarm_ft.LocalSwarm(stages=3) as swarm:
        before = swarm.peers
        with pytest.raises(OutOfTurn, match="peer stage-2: no job has started the peers yet"):
            swarm.kill("stage-2")
        report = swarm.train(steps=3, max_samples=24, eval_strategy="no", out=tmp_path / "tuned")
        names = swarm.peers
    assert len(report.losses) == 3
    assert before == names == ("stage-1", "stage-2", "stage-3")
    assert AutoModelForCausalLM.from_pretrained(report.model_dir).config.n_layer == 6


async def test_a_swarm_here_is_awaited_and_trains_again(sample: DemoInput, tmp_path: Path) -> None:
    events: list[object] = []
    first_job, second_job = quick(sample, tmp_path / "a"), quick(sample, tmp_path / "b")
    async with swarm_ft.LocalSwarm(stages=2, folder=tmp_path / "swarm") as swarm:
        first = await swarm.train_async(**first_job, on_event=events.append, progress=False)
        # Waiting inside of a running loop, as a cell of a notebook does.
        second = swarm.train(**second_job, progress=False)
        found = await swarm.status_async()
    assert first.losses == second.losses
    assert [e.loss for e in events if isinstance(e, StepCommitted)] == list(first.losses)
    assert len(found.members) == 2
    assert len(found.runs) == 2
    assert (tmp_path / "swarm").is_dir()


def test_a_peer_dies_and_its_replica_goes_on(sample: DemoInput, tmp_path: Path) -> None:
    with swarm_ft.LocalSwarm(stages=2, replicas=2) as swarm:
        killed: list[str] = []

        def kill_one(event: object) -> None:
            # In the swarm's own loop, where a call that waits would wait for itself.
            if isinstance(event, StepCommitted) and not killed:
                killed.append("stage-1.2")
                thread.start()

        thread = threading.Thread(target=lambda: swarm.kill(killed[0]))
        job = quick(sample, tmp_path / "tuned")
        job["steps"] = 8
        report = swarm.train(**job, progress=False, on_event=kill_one)
        thread.join()
        assert killed[0] not in swarm.peers
        with pytest.raises(NotFound, match=r"expected one of stage-1\.1"):
            swarm.kill("nobody")
    assert len(report.losses) == 8


def test_what_is_wrong_is_said_before_anything_begins(tmp_path: Path) -> None:
    swarm = swarm_ft.LocalSwarm(stages=7)
    with pytest.raises(OutOfTurn, match="is not running"):
        swarm.train()
    with swarm:
        with pytest.raises(BadOption, match="expected at most 6, the model's layers, got 7"):
            swarm.train(out=tmp_path / "tuned")
        with pytest.raises(BadOption, match="did you mean 'learning_rate'"):
            swarm.train(learning_rat=1e-4)  # type: ignore[call-arg]
        with pytest.raises(BadOption, match=r"^lr_schedule: expected constant, linear"):
            swarm.train(lr_schedule="stairs")  # type: ignore[arg-type]
        with pytest.raises(BadOption, match=r"^steps: expected 1 to 2147483648, got -1"):
            swarm.train(steps=-1)
        with pytest.raises(BadOption, match=r"^packing_strategy: expected packing beside it"):
            swarm.train(packing_strategy="wrapped")
    with pytest.raises(BadOption, match="expected 1 or more"):
        swarm_ft.LocalSwarm(stages=0)
    with pytest.raises(BadOption, match=r"^dataset: expected a value, got none"):
        swarm_ft.train(invite="swarm1", model="gpt2")
    with pytest.raises(BadInvite):
        swarm_ft.train(invite="swarm1", model="gpt2", dataset="notes.txt")
    with pytest.raises(BadOption, match=r"expected invite=\.\.\., got none"):
        swarm_ft.serve()


@pytest.mark.thorough
def test_three_roles_by_calls_that_wait(
    sample: DemoInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def buffers(name: str) -> swarm_ft.BufferOptions:
        return swarm_ft.BufferOptions(directory=tmp_path / name)

    with swarm_ft.coordinate(tmp_path / "runs.db") as coordinator:
        with pytest.raises(BadOption, match="expected peer, client or relay"):
            coordinator.invite("king")
        resources: Any = {"threads": 1, "device": "cpu", "models": [sample.model_dir]}
        with swarm_ft.serve(
            coordinator.invite(), layers="0-2", buffers=buffers("one"), **resources
        ) as one:
            two = swarm_ft.serve(
                coordinator.invite(), layers="2-4", buffers=buffers("two"), **resources
            )
            client = coordinator.invite("client")
            report = swarm_ft.train(
                invite=client,
                key_file=tmp_path / "client.pem",
                **quick(sample, tmp_path / "tuned"),
            )
            assert (
                f"swarm_ft.attach('{report.run_id}', ...) returns to it" in capsys.readouterr().err
            )
            assert one.name != two.name
            assert one.endpoint.startswith("127.0.0.1:")
            way: Any = {"invite": client, "key_file": tmp_path / "client.pem"}
            forecast = swarm_ft.plan(sample.model_dir, num_samples=12, seq_length=32, **way)
            fetched = submitted_and_fetched(sample, tmp_path / "fetched", way)
            cancelled = submitted_and_cancelled(sample, tmp_path / "never", way)
            two.stop()
            two.stop()
    assert [str(stage.layers) for stage in forecast.stages] == ["0-2", "2-4"]
    assert fetched.losses == report.losses
    assert cancelled.phase is RunPhase.CANCELLED
    assert not (tmp_path / "never").exists()
    assert len(report.losses) == 3
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").config.n_layer == 4


def submitted_and_fetched(sample: DemoInput, out: Path, way: Any) -> swarm_ft.RunReport:
    run_id = swarm_ft.submit(progress=False, **quick(sample, out), **way)
    (run,) = (one for one in swarm_ft.status(**way).runs if one.run_id == run_id)
    while run.phase is not RunPhase.FINISHED:
        (run,) = (one for one in swarm_ft.status(**way).runs if one.run_id == run_id)
    pieces: list[str] = []
    text = swarm_ft.generate(
        "def read(self", run_id, max_new_tokens=4, on_text=pieces.append, **way
    )
    assert (len(text.token_ids), str(text), text.run) == (4, "".join(pieces), run_id)
    with pytest.raises(BadOption, match=r"^max_new_tokens: expected 1 to"):
        swarm_ft.generate("def", run_id, max_new_tokens=0, **way)
    steps: list[RunEvent] = []
    report = swarm_ft.attach(run_id, out=out, progress=False, on_event=steps.append, **way)
    assert [one.loss for one in steps if isinstance(one, StepCommitted)] == list(report.losses)
    with pytest.raises(RunFailed, match="its result was fetched"):
        swarm_ft.attach(run_id, out=out, progress=False, **way)
    return report


def submitted_and_cancelled(sample: DemoInput, out: Path, way: Any) -> RunStatus:
    job = quick(sample, out)
    job["steps"] = 100_000
    run_id = swarm_ft.submit(progress=False, **job, **way)
    return swarm_ft.cancel(run_id, **way)


@pytest.mark.slow
@pytest.mark.variant
@pytest.mark.timeout(300)
def test_members_of_a_swarm_here_may_be_processes(sample: DemoInput, tmp_path: Path) -> None:
    with swarm_ft.LocalSwarm(stages=2, processes=True, folder=tmp_path / "swarm") as swarm:
        with pytest.raises(OutOfTurn, match="no job has started this swarm"):
            swarm.status()
        report = swarm.train(**quick(sample, tmp_path / "out"), progress=False)
        assert swarm.peers == ("stage-1", "stage-2")
        assert len(swarm.status().members) == 2
    assert len(report.losses) == 3
    assert {path.name for path in (tmp_path / "swarm" / "logs").iterdir()} == {
        "coordinator.log",
        "stage-1.log",
        "stage-2.log",
    }
