"""Residuals from step to step: only commits move them; redone steps and changes keep them."""

import pytest
import torch

from swarm_ft.errors import MalformedMessage
from swarm_ft.peer.reduce.gradient_coder import Residuals

N = 12


def listed(owed: torch.Tensor | None) -> list[float]:
    assert owed is not None
    found: list[float] = owed.tolist()
    return found


def do_step(
    residuals: Residuals, shard: tuple[int, int], worker: float, server: float
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A whole step that leaves these numbers owed; what it found."""
    step = residuals.begin(N, shard)
    found = step.worker(0, N), step.server(*shard)
    step.set_worker(0, N, torch.full((N,), float(worker)))
    step.set_server(*shard, torch.full((shard[1] - shard[0],), float(server)))
    return found


def test_nothing_is_owed_at_first() -> None:
    worker, server = do_step(Residuals(), (4, 8), 1, 2)
    assert worker is None
    assert server.tolist() == [0.0] * 4


def test_a_commit_makes_the_steps_residuals_the_ones_that_are_owed() -> None:
    residuals = Residuals()
    do_step(residuals, (4, 8), 1, 2)
    residuals.commit()
    worker, server = do_step(residuals, (4, 8), 3, 4)
    assert listed(worker) == [1.0] * N
    assert server.tolist() == [2.0] * 4


@pytest.mark.parametrize("redo", ["begin", "rollback"])
def test_a_step_that_is_redone_finds_what_was_owed_before_it(redo: str) -> None:
    residuals = Residuals()
    do_step(residuals, (4, 8), 1, 2)
    residuals.commit()
    do_step(residuals, (4, 8), 3, 4)
    if redo == "rollback":
        residuals.rollback()
        residuals.commit()
    worker, server = do_step(residuals, (4, 8), 5, 6)
    assert listed(worker) == [1.0] * N
    assert server.tolist() == [2.0] * 4


def test_what_a_dropped_attempt_still_writes_goes_nowhere() -> None:
    residuals = Residuals()
    stale = residuals.begin(N, (4, 8))
    do_step(residuals, (4, 8), 1, 2)
    stale.set_worker(0, N, torch.full((N,), 9.0))
    stale.set_server(4, 8, torch.full((4,), 9.0))
    residuals.commit()
    stale.set_worker(0, N, torch.full((N,), 9.0))
    worker, server = do_step(residuals, (4, 8), 0, 0)
    assert listed(worker) == [1.0] * N
    assert server.tolist() == [2.0] * 4


def test_parts_are_read_and_written_where_they_lie() -> None:
    residuals = Residuals()
    step = residuals.begin(N, (4, 8))
    for start in range(0, N, 2):
        step.set_worker(start, start + 2, torch.full((2,), float(start)))
    step.set_server(4, 6, torch.tensor([1.0, 2.0]))
    step.set_server(6, 8, torch.tensor([3.0, 4.0]))
    residuals.commit()
    after = residuals.begin(N, (4, 8))
    assert listed(after.worker(2, 5)) == [2.0, 2.0, 4.0]
    assert after.server(5, 7).tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ((4, 8), [1.0, 2.0, 3.0, 4.0]),
        ((6, 10), [3.0, 4.0, 0.0, 0.0]),
        ((2, 6), [0.0, 0.0, 1.0, 2.0]),
        ((5, 7), [2.0, 3.0]),
        ((0, 12), [0, 0, 0, 0, 1.0, 2.0, 3.0, 4.0, 0, 0, 0, 0]),
        ((8, 12), [0.0] * 4),
        ((0, 4), [0.0] * 4),
        ((4, 4), []),
    ],
)
def test_another_shard_keeps_what_is_owed_of_the_values_in_both(
    shard: tuple[int, int], expected: list[float]
) -> None:
    residuals = Residuals()
    step = residuals.begin(N, (4, 8))
    step.set_worker(0, N, torch.ones(N))
    step.set_server(4, 8, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    residuals.commit()
    worker, server = do_step(residuals, shard, 7, 7)
    assert listed(worker) == [1.0] * N
    assert server.tolist() == expected


def test_a_change_of_members_that_is_not_committed_loses_nothing() -> None:
    residuals = Residuals()
    do_step(residuals, (4, 8), 1, 2)
    residuals.commit()
    do_step(residuals, (0, 6), 3, 4)
    _, server = do_step(residuals, (4, 8), 5, 6)
    assert server.tolist() == [2.0] * 4


def test_another_gradient_owes_nothing() -> None:
    residuals = Residuals()
    do_step(residuals, (4, 8), 1, 2)
    residuals.commit()
    assert residuals.begin(N + 1, (0, 1)).worker(0, N) is None


def test_a_commit_without_a_step_changes_nothing() -> None:
    residuals = Residuals()
    residuals.commit()
    do_step(residuals, (4, 8), 1, 2)
    residuals.commit()
    residuals.commit()
    worker, _ = do_step(residuals, (4, 8), 0, 0)
    assert listed(worker) == [1.0] * N


# ---- snapshots


def test_what_is_exported_can_be_restored_elsewhere() -> None:
    residuals = Residuals()
    do_step(residuals, (4, 8), 1, 2)
    residuals.commit()
    do_step(residuals, (4, 8), 3, 4)
    other = Residuals()
    do_step(other, (0, 2), 8, 9)
    other.restore(residuals.export())
    other.commit()
    worker, server = do_step(other, (4, 8), 0, 0)
    assert listed(worker) == [1.0] * N
    assert server.tolist() == [2.0] * 4


def test_where_nothing_is_owed_nothing_is_exported() -> None:
    residuals, other = Residuals(), Residuals()
    assert residuals.export() == {}
    do_step(other, (4, 8), 1, 2)
    other.commit()
    other.restore({})
    assert other.export() == {}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"worker": None}, "expected worker, server and server_start, got"),
        ({"more": torch.zeros(1)}, "expected worker, server and server_start, got"),
        ({"worker": torch.zeros(N).double()}, "expected worker to be finite float32"),
        ({"worker": torch.full((N,), float("nan"))}, "expected worker to be finite"),
        ({"server": torch.zeros(2, 2)}, r"expected server to be finite float32 \[n\]"),
        ({"server_start": torch.tensor([9])}, "expected a shard of 12 values, got 4 from 9 on"),
        ({"server_start": torch.tensor([-1])}, "got 4 from -1 on"),
        ({"server_start": torch.tensor([1.0])}, "one int64"),
        ({"server_start": torch.tensor([1, 2])}, "one int64"),
    ],
    ids=str,
)
def test_tensors_that_are_no_residuals_are_refused(
    change: dict[str, torch.Tensor | None], match: str
) -> None:
    residuals = Residuals()
    do_step(residuals, (4, 8), 1, 2)
    residuals.commit()
    tensors = {k: v for k, v in (residuals.export() | change).items() if v is not None}
    other = Residuals()
    with pytest.raises(MalformedMessage, match=match):
        other.restore(tensors)
    assert other.export() == {}
