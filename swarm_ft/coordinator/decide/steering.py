"""Requests of people for a run: pause, resume, another rate or other codecs. Pure.

Each request is an event with its actor, and watchers of the run receive it at once.

A paused run finishes the present step and plans no other. Its peers stay and hold its state, so
that it resumes at once; meanwhile other peers may take over from leavers. The queue skips a paused
run that waits. Each commit carries the learning rate, and each plan the codecs, so that all peers
change in the same step. A repeated step has the rate and the codecs that it had before. A run with
a quality target that goes back to its beginning measures again, so changes of codecs for steps
before its oldest snapshot are dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.coordinator.facts.events import (
    CodecsChanged,
    RateChanged,
    RunPaused,
    RunRecord,
    RunResumed,
    Transition,
)
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import RateChange, Run
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.client import CodecChange, RunPhase
from swarm_ft.protocol.messages.events import Actor, EventKind
from swarm_ft.protocol.spec.run_spec import Codecs, forward_codec_of

_WORTH = 1.1
"""Ratio of quantisation steps above which a change of codecs pays."""


def steer(turn: Transition, event: RunPaused | RunResumed | RateChanged | CodecsChanged) -> None:
    """Grant a request; ignore one for a run that is over, or that changes nothing."""
    run = turn.state.runs.get(event.run_id)
    if run is None or run.phase.is_over:
        return
    match event:
        case RateChanged(_, learning_rate, actor):
            _change_rate(turn, run, learning_rate, actor)
        case CodecsChanged(_, codecs, actor):
            _change_codecs(turn, run, codecs, actor)
        case RunPaused(_, actor) if not run.steering.is_paused:
            _pause(turn, run, actor)
        case RunResumed(_, actor) if run.steering.is_paused:
            _resume(turn, run, actor)
        case RunPaused() | RunResumed():
            pass  # it changes nothing
        case _:
            assert_never(event)


def _pause(turn: Transition, run: Run, actor: Actor) -> None:
    is_open = run.phase is RunPhase.TRAINING and run.step is not None
    step = run.committed_steps if is_open else None
    reason = Reason(kind=ReasonKind.PAUSE_REQUESTED, step=step, actor=actor)
    run = replace(run, detail=reason, steering=replace(run.steering, is_paused=True))
    _grant(turn, run, EventKind.RUN_PAUSED, reason)


def _resume(turn: Transition, run: Run, actor: Actor) -> None:
    # `commits.resume_waiting_runs` follows.
    reason = Reason(kind=ReasonKind.RESUME_REQUESTED, actor=actor)
    run = replace(run, detail=reason, steering=replace(run.steering, is_paused=False))
    _grant(turn, run, EventKind.RUN_RESUMED, reason)


def _grant(turn: Transition, run: Run, kind: EventKind, reason: Reason) -> None:
    """Add the request to the run, so that a client that attaches later receives it too."""
    steering = run.steering.with_request(kind, run.past.all_steps, reason)
    _keep(turn, replace(run, steering=steering), kind, reason)


def _change_rate(turn: Transition, run: Run, learning_rate: float, actor: Actor) -> None:
    first = _first_unplanned(run)
    before = run.steering.peak_at(first, run.spec.train.learning_rate)
    run = replace(run, steering=run.steering.with_rate(RateChange(first, learning_rate)))
    reason = Reason(
        kind=ReasonKind.RATE_CHANGED,
        step=first,
        value=learning_rate,
        value_before=before,
        actor=actor,
    )
    _grant(turn, run, EventKind.RUN_STEERED, reason)


def _change_codecs(turn: Transition, run: Run, codecs: Codecs, actor: Actor) -> None:
    first = _first_unplanned(run)
    before = run.spec_at(first).train.codecs
    if codecs == before:
        return
    run = replace(run, steering=run.steering.with_codecs(CodecChange(first, codecs)))
    reason = Reason(
        kind=ReasonKind.CODECS_CHANGED,
        step=first,
        text=str(codecs),
        text_before=str(before),
        actor=actor,
    )
    _grant(turn, run, EventKind.RUN_STEERED, reason)


def follow_quality(turn: Transition, run: Run, step: StepNumber, excess: float | None) -> Run:
    """Change the codecs as a measurement of the cost of compression requires.

    A repeated step adds nothing: its measurement is known, and the same.

    Args:
        turn: Transition of the commit.
        run: Run after the commit.
        step: Committed step.
        excess: Loss that compression added, in nats; None if it was not measured.
    """
    known, steering = run.quality, run.steering
    if known is None or excess is None or step < steering.measured_steps:
        return run
    found = known.with_measurement(excess)
    run = replace(run, steering=replace(steering, quality=found, measured_steps=step + 1))
    first = _first_unplanned(run)
    now = run.steering.codecs_at(first) or run.spec.train.codecs
    if not _is_another(found.step_size, now):
        turn.set_run(run)
        turn.write(RunRecord(run))
        turn.publish(run.run_id, run)
        return run
    codecs = Codecs(forward_codec_of(found.step_size), run.spec.train.backward_codec)
    changed = run.steering.with_codecs(CodecChange(first, codecs))
    run = replace(run, steering=changed.without_codecs_before(run.oldest_kept_step))
    cost = Reason(kind=ReasonKind.COMPRESSION_COST, step=step, value=excess, parts=_quality_of(run))
    reason = Reason(kind=ReasonKind.CODECS_CHANGED, step=first, text=str(codecs), parts=(cost,))
    _keep(turn, run, EventKind.RUN_STEERED, reason)
    return run


def _quality_of(run: Run) -> tuple[Reason, ...]:
    found = run.quality_found
    if found is None:
        return ()
    quality = Reason(
        kind=ReasonKind.QUALITY,
        value=found.cost,
        value_before=found.asked,
        amount=found.num_measured,
    )
    return (quality,)


def _is_another(step_size: float, codecs: Codecs) -> bool:
    """Whether a quantisation step requires another activation codec: each change is written."""
    now = parse_codec_spec(codecs.forward, Direction.FORWARD).number
    return not 1 / _WORTH < step_size / now < _WORTH


def _first_unplanned(run: Run) -> StepNumber:
    """Return the first step that has no plan; changes take effect there."""
    return StepNumber(run.committed_steps + (run.step is not None))


def _keep(turn: Transition, run: Run, kind: EventKind, reason: Reason) -> None:
    turn.set_run(run)
    turn.write(RunRecord(run))
    turn.publish(run.run_id, run)
    turn.emit(kind, run, reason=reason, to_step=run.past.all_steps)
