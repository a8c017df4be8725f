"""Phase of a run for people: never `waiting waiting`, never a phase and a blank."""

import pytest

from swarm_ft.protocol.messages.client import RunPhase


@pytest.mark.parametrize(
    ("phase", "detail", "words"),
    [
        (RunPhase.WAITING, "waiting for layers 0-3", "waiting: layers 0-3"),
        (RunPhase.WAITING, "gathering peers", "waiting: gathering peers"),
        (RunPhase.WAITING, "paused after step 8", "paused after step 8"),
        (RunPhase.QUEUED, "", "queued"),
        (RunPhase.LOADING, "peers load their stages", "loading: peers load their stages"),
        (RunPhase.EXPORTING, "peers write their stages", "exporting: peers write their stages"),
        (RunPhase.CANCELLED, "cancelled by a client", "cancelled by a client"),
        (RunPhase.FAILED, "no peer can host it", "failed: no peer can host it"),
    ],
)
def test_a_phase_and_its_detail_are_one_text(phase: RunPhase, detail: str, words: str) -> None:
    assert phase.in_words(detail) == words
