from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from swarm_ft.client.report import WINDOW_STEPS, ProgressState, RunProgress
from swarm_ft.ids import BlockIndex, RunId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.events import Actor, EventKind, Steered
from swarm_ft.protocol.messages.reports import Traffic
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.specs import run_spec


def _spec(num_steps: int = 40) -> RunSpec:
    return run_spec(num_steps=num_steps, num_samples=100, seq_length=10)


def _step(number: int, *, loss: float = 2.0, seconds: float = 0.5) -> StepCommitted:
    traffic = Traffic(
        boundary=BlockIndex(2),
        forward_bytes=100,
        backward_bytes=300,
        forward_uncompressed_bytes=1200,
        backward_uncompressed_bytes=1200,
    )
    return StepCommitted(
        step=StepNumber(number),
        loss=loss,
        learning_rate=1e-3,
        grad_norm=1.0,
        num_samples=4,
        seconds=seconds,
        traffic=(traffic,),
    )


def _status(phase: RunPhase, detail: str = "", committed: int = 0) -> RunStatus:
    return RunStatus(
        run_id=RunId("r"), phase=phase, detail=detail, committed_steps=committed, spec=_spec()
    )


def _after(*events: RunStatus | StepCommitted) -> ProgressState:
    state = ProgressState(num_steps=40)
    for event in events:
        state = state.with_event(event)
    return state


def test_before_the_first_step_nothing_is_claimed() -> None:
    state = _after()
    assert (state.loss, state.eta_s) == (None, None)
    assert (state.samples_per_second, state.bytes_saved, state.ratio) == (0.0, 0, 1.0)
    assert state.line() == "queued"


def test_steps_add_up() -> None:
    state = _after(*(_step(k, loss=3.0 - k) for k in range(3)))
    assert state.loss == 1.0
    assert state.committed_steps == 3
    assert state.samples_per_second == pytest.approx(4 / 0.5)
    assert state.bytes_saved == 3 * 2000
    assert state.ratio == pytest.approx(6.0)
    assert state.eta_s == pytest.approx(37 * 0.5)


def test_speed_and_eta_follow_the_last_steps_only() -> None:
    slow = [_step(0, seconds=100.0)]
    fast = [_step(k, seconds=0.1) for k in range(1, WINDOW_STEPS + 1)]
    state = _after(*slow, *fast)
    assert state.samples_per_second == pytest.approx(40)
    assert state.eta_s == pytest.approx((40 - WINDOW_STEPS - 1) * 0.1)


def test_a_run_that_goes_back_replaces_what_was_known_from_there_on() -> None:
    straight = _after(*(_step(k) for k in range(4)))
    back = _after(*(_step(k, loss=9.0) for k in (0, 1)), *(_step(k) for k in (2, 3, 4, 2, 3)))
    assert back.committed_steps == straight.committed_steps
    assert back.bytes_saved == straight.bytes_saved
    assert back.totals[2:] == straight.totals[2:]


def test_a_status_with_fewer_steps_takes_the_later_ones_back() -> None:
    steps = [_step(k) for k in range(4)]
    state = _after(*steps, _status(RunPhase.WAITING, "waiting for layers 12-24", committed=2))
    assert state.committed_steps == 2
    assert state.totals == _after(*steps[:2]).totals


def test_a_history_told_again_ends_in_the_same_state() -> None:
    steps = [_step(k) for k in range(5)]
    again = _after(*steps, _status(RunPhase.TRAINING, committed=5), *steps)
    assert again == _after(*steps)


def test_the_line_says_what_the_run_waits_for_until_it_goes_on() -> None:
    waiting = _after(_step(0), _status(RunPhase.WAITING, "waiting for layers 12-24", committed=1))
    assert waiting.line() == "waiting: layers 12-24"
    assert (
        waiting.with_event(_step(1)).line() == "loss 2.000  8.0 samples/s  sent 6.0x less  ETA 0:19"
    )


def test_a_peer_that_a_training_run_hears_nothing_of_is_in_the_line_until_it_speaks() -> None:
    notice = "peer b (layers 2-4) has said nothing for 4 s"
    silent = _after(_step(0), _status(RunPhase.TRAINING, notice, committed=1))
    assert silent.line() == notice
    assert (
        silent.with_event(_status(RunPhase.TRAINING, committed=1)).line().startswith("loss 2.000")
    )


def test_a_long_eta_has_hours() -> None:
    assert _after(_step(0, seconds=300.0)).line().endswith("ETA 3:15:00")


def test_a_detail_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in _after(_status(RunPhase.WAITING, "wait\x1b[2J\nfor")).line()


def _plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def _written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_about_every_tenth_of_the_run_is_a_plain_line() -> None:
    console = _plain_console()
    with RunProgress(_spec(num_steps=40).train, console).display() as progress:
        progress.show_status(_status(RunPhase.WAITING, "waiting for layers 2-4"))
        progress.show_status(_status(RunPhase.WAITING, "waiting for layers 2-4"))
        for k in range(40):
            progress.show_step(_step(k))
        progress.message("[done]")
    lines = _written(console).splitlines()
    assert lines[0] == "waiting: layers 2-4"
    assert lines[1].startswith("step 1/40  loss 2.000")
    assert [line.split()[1] for line in lines[2:-1]] == [f"{k}/40" for k in range(4, 41, 4)]
    assert lines[-1] == "[done]"
    assert "\x1b" not in _written(console)


def test_a_history_told_again_is_not_printed_again() -> None:
    console = _plain_console()
    with RunProgress(_spec(num_steps=40).train, console).display() as progress:
        for k in (*range(20), *range(24)):
            progress.show_step(_step(k))
    steps = [line.split()[1] for line in _written(console).splitlines()]
    assert steps == ["1/40", "4/40", "8/40", "12/40", "16/40", "20/40", "24/40"]


def test_a_request_of_the_operator_is_printed_at_once_and_only_once() -> None:
    words = "paused by the swarm's operator on the coordinator's page"
    request = Steered(
        number=1,
        kind=EventKind.RUN_PAUSED,
        actor=Actor.OPERATOR,
        step=StepNumber(9),
        words=words,
    )
    rate = "learning rate 0.001 from step 9 on"
    second = replace(request, number=2, kind=EventKind.RUN_STEERED, words=rate)
    console = _plain_console()
    with RunProgress(_spec().train, console).display() as progress:
        for status in (
            replace(_status(RunPhase.TRAINING, words, committed=9), steered=(request,)),
            replace(_status(RunPhase.TRAINING, committed=9), steered=(request, second)),
            replace(_status(RunPhase.TRAINING, committed=9), steered=(request, second)),
        ):
            progress.show_status(status)
    lines = _written(console).splitlines()
    assert [lines.count(words), lines.count(rate)] == [1, 1]
    assert progress.state.steered == (request, second)


def test_on_a_terminal_one_bar_shows_step_and_numbers() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={})
    with RunProgress(_spec(num_steps=40).train, console).display() as progress:
        progress.show_step(_step(9))
        progress.message("a line above")
    text = _written(console)
    for part in ("step 10/40", "loss 2.000", "8.0 samples/s", "6.0x", "ETA 0:15", "a line above"):
        assert part in text


def test_who_is_gone_stays_to_be_read_above_the_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={})
    with RunProgress(_spec(num_steps=40).train, console).display() as progress:
        progress.show_status(_status(RunPhase.WAITING, "peer b is gone", committed=9))
        progress.show_status(_status(RunPhase.WAITING, "peer b is gone", committed=9))
        progress.show_status(_status(RunPhase.LOADING, "peers load their stages", committed=9))
        progress.show_step(_step(9))
    lines = [line.rstrip() for line in _written(console).replace("\r", "\n").splitlines()]
    assert sum(line.endswith("peer b is gone") and "step" not in line for line in lines) == 1
    assert any("step 9/40" in line and "peers load their stages" in line for line in lines)


def test_who_joins_while_the_others_train_is_told_above_the_bar_and_the_bar_goes_on() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={})
    with RunProgress(_spec(num_steps=40).train, console).display() as progress:
        progress.show_status(_status(RunPhase.TRAINING, "peer x joins layers 0-3", committed=9))
        progress.show_step(_step(9))
    lines = [line.rstrip() for line in _written(console).replace("\r", "\n").splitlines()]
    assert (
        sum(line.endswith("peer x joins layers 0-3") and "step" not in line for line in lines) == 1
    )
    assert any("step 10/40" in line and "loss 2.000" in line for line in lines)


def test_the_display_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(_spec().train).display() as progress:
        progress.message("hello")
    assert capsys.readouterr() == ("", "hello\n")
