"""Quotas of clients: the decision alone, over any number of jobs."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.quotas import Quotas, Upload
from swarm_ft.coordinator.facts.state import AttemptState, Run
from swarm_ft.errors import BadDataset, Busy, OverQuota, SwarmError
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.spec.layers import LayerRange
from tests.unit.coordinator.conftest import MakeSpec

QUOTAS = Quotas(queued=2, jobs=5, job_bytes=1000, client_bytes=2000, total_bytes=3000)
SIZES = {2: 64, 10: 320, 60: 1920}
"""Bytes of tokens of jobs of so many samples: 8 tokens of 4 bytes each."""
WORKING = AttemptState(assignments=(StageAssignment(peer_id=PeerId("p"), layers=LayerRange(0, 4)),))
OWNERS = ("a", "b", "")


@pytest.fixture(scope="module")
def runs(make_spec: MakeSpec) -> dict[tuple[str, RunPhase, int], Run]:
    """A run of each kind."""
    specs = {num: make_spec(num_samples=num, seq_length=8) for num in SIZES}
    return {
        (owner, phase, num): Run(
            run_id=RunId(f"{owner}-{phase}-{num}"),
            spec=specs[num],
            owner=owner,
            phase=phase,
            attempt=WORKING if phase.is_working else AttemptState(),
        )
        for owner in OWNERS
        for phase in RunPhase
        for num in SIZES
    }


kinds = st.tuples(st.sampled_from(OWNERS), st.sampled_from(RunPhase), st.sampled_from([*SIZES]))
uploads = st.builds(Upload, st.sampled_from(OWNERS), st.integers(1, 1000))


def refusal(runs: Sequence[Run], under_way: Sequence[Upload], job: Upload) -> SwarmError | None:
    try:
        QUOTAS.check(runs, under_way, job, "client a")
    except SwarmError as error:
        return error
    return None


@given(chosen=st.lists(kinds, max_size=6), under_way=st.lists(uploads, max_size=3), job=uploads)
def test_what_is_taken_in_keeps_to_all_bounds(
    runs: dict[tuple[str, RunPhase, int], Run],
    chosen: list[tuple[str, RunPhase, int]],
    under_way: list[Upload],
    job: Upload,
) -> None:
    known = [runs[kind] for kind in chosen]
    counted = [(r.owner, SIZES[n]) for r, (_, phase, n) in zip(known, chosen, strict=True)
            if phase <= RunPhase.FINISHED]  # fmt: skip
    all_of = [*counted, *((one.owner, one.num_bytes) for one in (*under_way, job))]
    own = sum(size for owner, size in all_of if owner == job.owner)
    queued = sum(r.owner == job.owner and r.phase < RunPhase.LOADING for r in known)
    queued += sum(one.owner == job.owner for one in (*under_way, job))
    going = sum(not r.phase.is_over for r in known) + len(under_way) + 1
    fits = own <= 2000 and queued <= 2 and going <= 5 and sum(s for _, s in all_of) <= 3000
    error = refusal(known, under_way, job)
    assert (error is None) == fits
    if own > 2000 or queued > 2:
        assert isinstance(error, OverQuota)
    elif not fits:
        assert isinstance(error, Busy)


def test_refusals_tell_what_is_allowed_and_what_to_do(
    runs: dict[tuple[str, RunPhase, int], Run],
) -> None:
    queued = [runs["a", RunPhase.QUEUED, num] for num in (2, 10)]
    large = [runs["a", RunPhase.FINISHED, 60]]
    for known, size, words in (
        (queued, 1, "2 jobs of client a are queued, 2 are allowed; wait until one starts, or"),
        (large, 500, r"have 0\.00 GiB of tokens here, 0\.00 GiB are allowed, .*fetch or cancel"),
    ):
        with pytest.raises(OverQuota, match=words):
            QUOTAS.check(known, [], Upload("a", size), "client a")
        assert refusal(known, [], Upload("b", 1)) is None
    with pytest.raises(
        BadDataset, match="data: expected at most 1000 bytes of tokens, got 1001; shorten"
    ):
        QUOTAS.check([], [], Upload("a", 1001), "client a")
