from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
from rich.console import Console

from swarm_ft.client.forecast import EvalForecast, Forecast
from swarm_ft.client.formatting import kind_lines
from swarm_ft.client.report import ProgressState, RunReport, StepTotals, eval_line
from swarm_ft.errors import BadOption, ProtocolError
from swarm_ft.ids import BlockIndex, RunId, StepNumber
from swarm_ft.protocol.machines.step_cost import SecondsRange
from swarm_ft.protocol.messages.client import (
    CodecChange,
    Evaluated,
    RunPhase,
    RunStatus,
    StepCommitted,
)
from swarm_ft.protocol.messages.events import Actor, EventKind, Rollback, Steered
from swarm_ft.protocol.messages.reports import ByteCounts, GradientTraffic, Traffic
from swarm_ft.protocol.spec.run_spec import Codecs, Dtype, TaskKind
from swarm_ft.protocol.spec.tasks import Classification
from tests.specs import run_spec


def _step(number: int, *, loss: float = 2.0, keys: int = 4, relayed: int = 0) -> StepCommitted:
    def sent(boundary: int) -> tuple[Traffic, Traffic]:
        index = BlockIndex(boundary)
        return (
            Traffic(
                boundary=index,
                forward_bytes=10,
                forward_uncompressed_bytes=80,
                key_frames=keys,
                delta_frames=4 - keys,
            ),
            Traffic(
                boundary=index,
                backward_bytes=20,
                backward_uncompressed_bytes=80,
                relayed_bytes=relayed,
            ),
        )

    return StepCommitted(
        step=StepNumber(number),
        loss=loss,
        learning_rate=1e-3,
        grad_norm=1.0,
        num_samples=4,
        seconds=0.5,
        traffic=(*sent(10), *sent(2)),
        gradients=GradientTraffic(sent_bytes=7, uncompressed_bytes=56, relayed_bytes=relayed),
        state_bytes=3,
    )


def _evaluated(step: int, loss: float, compressed: float | None = None, sent: int = 0) -> Evaluated:
    traffic = Traffic(
        boundary=BlockIndex(2), evaluation_bytes=sent, evaluation_uncompressed_bytes=2 * sent
    )
    return Evaluated(
        step=StepNumber(step),
        num_samples=5,
        eval_loss=loss,
        compressed_eval_loss=compressed,
        traffic=(traffic,) if sent else (),
    )


def _after(*steps: StepCommitted | Evaluated) -> ProgressState:
    return reduce(ProgressState.with_event, steps, ProgressState(num_steps=9))


def _report(*steps: StepCommitted, before: float = 3.0, after: float = 1.0) -> RunReport:
    state = _after(*steps)
    return RunReport(
        run_id=RunId("run-1"),
        losses=state.losses,
        totals=state.last,
        evaluations=(_evaluated(0, before), _evaluated(len(state.losses), after)),
        model_dir="out/model",
    )


def test_the_dtype_of_the_result_stands_beside_the_loss_of_float32_weights() -> None:
    """A bfloat16 file has another loss than the evaluated float32 weights."""
    report = replace(_report(_step(0)), result_dtype=Dtype.BFLOAT16)
    remark = "(float32 weights; the result is stored as bfloat16)"
    assert f"evaluation loss      3.000 -> 1.000   {remark}" in report.summary_lines()
    assert json.loads(report.to_json())["result_dtype"] == "bfloat16"
    assert "evaluation loss      3.000 -> 1.000" in _report(_step(0)).summary_lines()


def test_the_document_and_the_summary_have_what_people_requested() -> None:
    request = Steered(
        number=1,
        kind=EventKind.RUN_STEERED,
        actor=Actor.OPERATOR,
        step=StepNumber(88),
        words="learning rate 0.001 from step 89 on",
    )
    report = replace(_report(_step(0)), steered=(request,))
    assert json.loads(report.to_json())["steered"] == [
        {
            "step": 88,
            "kind": "steered",
            "actor": "operator",
            "words": "learning rate 0.001 from step 89 on",
        }
    ]
    line = "steered              learning rate 0.001 from step 89 on"
    assert line in report.summary_lines()


def test_the_document_has_the_promised_fields() -> None:
    document = json.loads(_report(_step(0, loss=3.5), _step(1, loss=2.5, keys=0)).to_json())
    assert document == {
        "run_id": "run-1",
        "model_dir": "out/model",
        "went_back": [],
        "steered": [],
        "losses": [3.5, 2.5],
        "steps": 2,
        "stopped_early": False,
        "result_step": 2,
        "samples": 8,
        "seconds": 1.0,
        "samples_per_second": 8.0,
        "forecast": None,
        "eval_weights_dtype": "float32",
        "result_dtype": "float32",
        "eval_before": {"loss": 3.0, "perplexity": pytest.approx(math.exp(3))},
        "eval": {"loss": 1.0, "perplexity": pytest.approx(math.e)},
        "evaluations": [
            {
                "step": step,
                "samples": 5,
                "bytes": 0,
                "loss": loss,
                "perplexity": pytest.approx(math.exp(loss)),
            }
            for step, loss in ((0, 3.0), (2, 1.0))
        ],
        "eval_samples": 10,
        "bytes_by_kind": {
            "forward": {"sent": 40, "uncompressed": 320},
            "backward": {"sent": 80, "uncompressed": 320},
            "gradients": {"sent": 14, "uncompressed": 112},
            "state": {"sent": 6, "uncompressed": 6},
            "evaluation": {"sent": 0, "uncompressed": 0},
        },
        "relayed_bytes": 0,
        "codecs": [],
        "quality": None,
        "bytes": {
            boundary: {
                "forward": 20,
                "backward": 40,
                "forward_uncompressed": 160,
                "backward_uncompressed": 160,
                "key_frames": 4,
                "delta_frames": 4,
                "relayed": 0,
                "evaluation": 0,
                "evaluation_uncompressed": 0,
                "evaluation_relayed": 0,
            }
            for boundary in ("2", "10")
        },
    }
    assert list(document["bytes"]) == ["2", "10"]


def test_a_run_that_goes_back_counts_no_step_and_no_byte_twice() -> None:
    straight = _report(*(_step(k) for k in range(4)))
    first = [_step(k) for k in range(2)]
    lost = [_step(k, loss=9.0) for k in (2, 3)]
    assert _report(*first, *lost, *(_step(k) for k in (2, 3))) == straight


def test_a_run_that_goes_back_and_stays_shorter_has_fewer_steps() -> None:
    assert _after(_step(0), _step(1), _step(2), _step(1, loss=7.0)).losses == (2.0, 7.0)


def test_a_history_told_again_counts_once() -> None:
    steps = [_step(k) for k in range(3)]
    assert _report(*steps, *steps) == _report(*steps)


def test_evaluations_go_back_with_the_run_and_are_told_once() -> None:
    first = (_evaluated(0, 5.0), _step(0), _step(1), _evaluated(2, 4.0), _step(2))
    state = _after(*first, _evaluated(3, 9.0), _step(1))
    assert [(one.step, one.loss) for one in state.evaluations] == [(0, 5.0)]
    again = (*first, _evaluated(3, 3.0))
    assert _after(*again, *again).evaluations == (
        _evaluated(0, 5.0),
        _evaluated(2, 4.0),
        _evaluated(3, 3.0),
    )


def test_what_compression_costs_is_told_beside() -> None:
    line = eval_line(_evaluated(2, 1.0, 2.0))
    assert line == f"eval_loss 1.000  perplexity {math.e:.1f}  compressed {math.exp(2):.1f}"
    compressed = Evaluated(step=StepNumber(0), num_samples=5, compressed_eval_loss=2.0)
    assert compressed.loss == 2.0
    assert eval_line(compressed).endswith("with activations compressed")


def test_classes_are_told_by_their_metrics() -> None:
    task = Classification(TaskKind.CLASSIFICATION, ("bad", "good"))
    before, after = (
        Evaluated(step=StepNumber(step), num_samples=4, eval_loss=0.5, counts=counts)
        for step, counts in ((0, (0, 2, 0, 4, 2, 2)), (2, (2, 2, 2, 2, 2, 2)))
    )
    line = eval_line(before, task)
    assert line == "eval_loss 0.500  accuracy 0.500  matthews_correlation 0.000  f1 0.667"
    assert eval_line(replace(before, compressed_eval_loss=0.75), task).endswith("ed loss 0.750")
    report = replace(_report(_step(0), _step(1)), evaluations=(before, after), task=task)
    assert json.loads(report.to_json())["eval"] == {
        "loss": 0.5,
        "accuracy": 1.0,
        "matthews_correlation": 1.0,
        "f1": 1.0,
    }
    assert "accuracy             0.500 -> 1.000" in report.summary_lines()
    assert not any("perplexity" in one for one in report.summary_lines())
    # A coordinator that reports another number of them is ignored.
    assert eval_line(replace(before, counts=(1,)), task) == "eval_loss 0.500"


def test_a_missing_step_is_an_error_and_not_a_shifted_loss() -> None:
    with pytest.raises(ProtocolError, match="expected step 1, got step 2"):
        _report(_step(0), _step(2))


def test_a_run_without_steps_or_evaluation_still_has_a_document() -> None:
    report = RunReport(
        run_id=RunId("r"),
        losses=(),
        totals=StepTotals(),
        evaluations=(),
        model_dir="m",
    )
    document = json.loads(report.to_json())
    assert (document["losses"], document["eval"], document["samples_per_second"]) == ([], None, 0)
    assert report.summary_lines() == ["result               m"]


WENT_BACK = Rollback(
    from_step=StepNumber(5), to_step=StepNumber(2), why="a peer left", remedy="a replica"
)


def test_a_report_prints_in_six_lines() -> None:
    report = _report(_step(0, loss=3.5), _step(1, loss=2.5))
    assert str(report).splitlines() == [
        "run-1            2 steps, 8 samples in 1.0 s (8.0 samples/s)",
        "training loss    3.500 -> 2.500",
        "evaluation loss  3.000 -> 1.000 (perplexity 2.7)",
        "sent             140 bytes instead of 758 bytes (5.4x less)",
        "went back        never",
        "result           out/model (2 steps)",
    ]
    other = replace(report, num_steps=9, evaluations=(), rollbacks=(WENT_BACK, WENT_BACK))
    lines = str(other).splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("run-1            2 of 9 steps, ")
    assert lines[2] == "evaluation loss  not evaluated"
    assert lines[4] == "went back        2 times, 6 steps trained again"
    empty = replace(report, losses=(), totals=StepTotals(), evaluations=())
    assert "training loss    no step ran" in str(empty)


def test_a_notebook_shows_a_report_in_a_line() -> None:
    report = _report(*(_step(number) for number in range(500)))
    assert repr(report).startswith("RunReport(run_id='run-1', model_dir='out/model'")
    assert len(repr(report)) < 200


def test_numbers_that_json_lacks_become_null() -> None:
    report = _report(_step(0, loss=math.nan), after=800.0)
    document = json.loads(report.to_json())
    assert document["losses"] == [None]
    assert document["eval"] == {"loss": 800.0, "perplexity": None}


def test_the_file_is_written_whole_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("earlier")
    report = _report(_step(0))
    report.write(path)
    assert path.read_text() == report.to_json()
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_file_that_cannot_be_written_is_a_bad_option(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"--json .*cannot be written"):
        _report(_step(0)).write(tmp_path / "absent" / "report.json")
    (tmp_path / "directory").mkdir()
    with pytest.raises(BadOption, match=r"--json .*cannot be written"):
        _report(_step(0)).write(tmp_path / "directory")
    assert [entry.name for entry in tmp_path.iterdir()] == ["directory"]


def test_the_summary_tells_loss_perplexity_bytes_and_where_the_result_lies() -> None:
    console = Console(file=io.StringIO(), width=80)
    _report(_step(0, loss=3.5), _step(1, loss=2.5, keys=0)).print_summary(console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "training loss        3.500 -> 2.500" in text
    assert f"perplexity           {math.exp(3):.1f} -> {math.e:.1f}" in text
    rows = [" ".join(line.split()) for line in text.splitlines() if " of 160 bytes" in line]
    assert rows == [
        f"{boundary} 20 bytes of 160 bytes 8.0x 40 bytes of 160 bytes 4.0x 4 / 4"
        for boundary in (2, 10)
    ]
    assert "out/model" in text


def test_kinds_that_were_sent_have_a_line_each_and_one_together() -> None:
    lines = kind_lines(_report(_step(0)).totals.sent)
    assert [line[:20].strip() for line in lines] == [
        "forward",
        "backward",
        "gradients",
        "state",
        "in all",
    ]
    assert kind_lines(ByteCounts()) == []
    assert len(kind_lines(ByteCounts(forward_bytes=1, forward_uncompressed_bytes=8))) == 1


def test_evaluations_bytes_and_samples_are_told_apart() -> None:
    report = replace(
        _report(_step(0), _step(1)),
        evaluations=(_evaluated(0, 3.0, sent=100), _evaluated(2, 1.0, sent=10)),
    )
    document = json.loads(report.to_json())
    assert document["bytes_by_kind"]["evaluation"] == {"sent": 110, "uncompressed": 220}
    assert document["bytes_by_kind"]["forward"] == {"sent": 40, "uncompressed": 320}
    assert document["samples"] == 8
    assert document["eval_samples"] == 10
    assert [(one["samples"], one["bytes"]) for one in document["evaluations"]] == [
        (5, 100),
        (5, 10),
    ]
    assert document["bytes"]["2"]["evaluation"] == 110
    assert document["bytes"]["10"]["evaluation"] == 0
    assert kind_lines(report.sent)[-2:] == [
        "evaluation           110 bytes instead of 220 bytes (2.0x less)",
        "in all               250 bytes instead of 978 bytes (3.9x less)",
    ]


def test_a_run_that_stopped_early_tells_where_and_whose_weights_it_gives() -> None:
    status = RunStatus(
        run_id=RunId("run-1"),
        phase=RunPhase.FINISHED,
        detail="the result can be fetched",
        committed_steps=3,
        spec=run_spec(),
        result_step=StepNumber(1),
    )
    before = _after(_step(0), _evaluated(1, 2.0), _step(1), _step(2), _evaluated(3, 5.0))
    state = before.with_event(status)
    assert state.losses == before.losses
    assert (state.result_step, [one.step for one in state.evaluations]) == (1, [1, 3])
    report = replace(
        _report(_step(0), _step(1), _step(2)),
        evaluations=(_evaluated(0, 9.0), *state.evaluations),
        num_steps=9,
        result_step=state.result_step,
    )
    document = json.loads(report.to_json())
    assert (document["steps"], document["result_step"]) == (3, 1)
    assert document["stopped_early"]
    assert document["eval"]["loss"] == 2.0
    text = "\n".join(report.summary_lines())
    assert "stopped early        after step 3 of 9: evaluations did not improve" in text
    assert "best weights         from step 1" in text
    assert "evaluation loss      9.000 -> 2.000" in text


def test_codecs_that_were_changed_are_told_with_their_steps() -> None:
    changes = (
        CodecChange(StepNumber(1), Codecs("aq2+z", "q2+z")),
        CodecChange(StepNumber(7), Codecs("aq1", "q2+z")),
    )
    status = RunStatus(
        run_id=RunId("run-1"),
        phase=RunPhase.TRAINING,
        detail="",
        committed_steps=2,
        spec=run_spec(),
        codecs=changes,
    )
    assert _after(_step(0), _step(1)).with_event(status).codecs == changes
    report = replace(_report(_step(0), _step(1)), codecs=changes[:1])
    assert json.loads(report.to_json())["codecs"] == [
        {"first_step": 1, "forward": "aq2+z", "backward": "q2+z"}
    ]
    assert "codecs               aq2+z/q2+z from step 1 on" in report.summary_lines()


def test_the_summary_sets_the_forecast_beside_what_happened() -> None:
    report = _report(_step(0), _step(1))
    expected = Forecast(
        stages=(),
        first_step_s=1.0,
        step_s=1.0,
        seconds=2.0,
        seconds_range=SecondsRange(1.0, 2.0, 4.0),
        samples_per_s=2 * report.samples_per_second,
        samples_range=(40.0, 60.0),
        bound_by="the uplink of peer-1",
        kwh=0.0,
        evaluation=None,
        shadows=None,
        unknown=(),
    )
    evaluated = EvalForecast(times=2, samples=8, sent_bytes=1e6, seconds=1.0)
    for evaluation in (None, evaluated):
        full = replace(report, forecast=replace(expected, evaluation=evaluation))
        (line,) = (one for one in full.summary_lines() if one.startswith("forecast "))
        reached = f"{report.samples_per_second:.3g}"
        assert line == f"forecast             40 to 60 samples/s; reached {reached}"
        fields = json.loads(full.to_json())["forecast"]
        assert fields["samples_per_second_range"] == [40.0, 60.0]
        assert fields["seconds_range"] == [1.0, 4.0]


def test_what_went_over_relays_is_told_where_anything_did() -> None:
    report = _report(_step(0, relayed=5), _step(1))
    assert kind_lines(report.totals.sent)[-1].split() == [
        "over",
        "relays",
        "15",
        "bytes",
        "(10.7%)",
    ]
    document = json.loads(report.to_json())
    assert document["relayed_bytes"] == 15
    assert {boundary["relayed"] for boundary in document["bytes"].values()} == {5}
