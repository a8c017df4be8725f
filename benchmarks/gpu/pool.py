"""Tasks of a part in several processes, which report their results as they end."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.parts import Scene
from benchmarks.gpu.report import Row

PROCESSES, REHEARSED_PROCESSES = 12, 2


@dataclass(frozen=True, slots=True)
class Task:
    """Something to be done apart from all else.

    Attributes:
        work: a function of a module, or a `partial` of one, that finds rows.
    """

    name: str
    work: Callable[[], list[Row]]


def done_in_processes(tasks: Sequence[Task], scene: Scene) -> Iterator[Row]:
    """Run tasks in processes and yield their rows as they end; the first task begins first.

    What is not done in time is a row too. Processes belong to the part's group, and end with it.
    """
    left, most = [task.name for task in tasks], REHEARSED_PROCESSES
    if torch.cuda.is_available() and not scene.rehearse:
        most = min(PROCESSES, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
    with context.Pool(min(most, len(tasks)), _begin) as pool:
        found = pool.imap_unordered(_done, tasks)
        while left:
            try:
                name, rows = found.next(timeout=max(0.0, scene.left_s))
            except multiprocessing.TimeoutError:
                yield {"table": "not done in time", "what": ", ".join(left)}
                return
            left.remove(name)
            yield from rows


def _begin() -> None:
    sys.stdout = sys.stderr  # the parent process reports the rows
    torch.set_num_threads(1)


def _done(task: Task) -> tuple[str, list[Row]]:
    try:
        return task.name, task.work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are to be done
        traceback.print_exc()
        words = f"{type(error).__name__}: {error}"[:300]
        return task.name, [{"table": "trouble", "what": task.name, "wrong": 1, "first": words}]
