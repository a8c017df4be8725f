"""Runs parts one after the other, each in a process of its own that its time ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu import needs
from benchmarks.gpu.parts import END, Part
from benchmarks.gpu.report import CUT_OFF, DONE, FAILED, RUNNING, PartReport, Report, Row, Value

ROOT = Path(__file__).parents[2]
CHILD = "benchmarks.gpu.child"
LOOK_S = 0.5


def run_all(
    parts: Iterable[Part],
    report: Report,
    changed: Callable[[], object],
    *,
    limit_s: float | None,
    **scene: object,
) -> None:
    """Run parts and put what they find into a report.

    Args:
        parts: in this order.
        report: that grows.
        changed: called after every row.
        limit_s: of each part; None: its own.
        scene: what each is given of a `Scene`.
    """
    scene_text = json.dumps(scene)
    for part in parts:
        part_report = PartReport(part.name, part.title)
        report.parts.append(part_report)
        lacks = needs.missing(part.needs)
        if lacks:
            part_report.how, part_report.why = FAILED, f"carry {', '.join(lacks)}"
        else:
            _run(
                part, part_report, changed, scene_text, part.limit_s if limit_s is None else limit_s
            )
        changed()


def _run(
    part: Part,
    part_report: PartReport,
    changed: Callable[[], object],
    scene_text: str,
    seconds: float,
) -> None:
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", CHILD, part.name, str(seconds), scene_text],
        cwd=ROOT,
        stdin=subprocess.PIPE,  # open as long as this process lives
        stdout=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    try:
        for words in _lines(process, began_s + seconds):
            if END in words:
                part_report.why = str(words[END])
                part_report.how = FAILED if part_report.why else DONE
                continue
            part_report.rows.append(words)
            part_report.seconds = time.monotonic() - began_s
            changed()
        if part_report.how == RUNNING and process.poll() is None:
            part_report.how, part_report.why = CUT_OFF, f"it had {seconds:.0f} s"
        elif part_report.how == RUNNING:
            part_report.how, part_report.why = (
                FAILED,
                f"its process ended with {process.returncode}",
            )
    finally:
        end_group(process)
        part_report.seconds = time.monotonic() - began_s


def _lines(process: subprocess.Popen[bytes], end_s: float) -> Iterator[Row]:
    """Yield the rows that a process prints until it ends, or until its time is up."""
    output = process.stdout
    if output is None:
        raise ValueError("the process has no output to read")
    left = b""
    while time.monotonic() < end_s:
        if not select.select([output], [], [], LOOK_S)[0]:
            continue
        data = os.read(output.fileno(), 1 << 16)
        if not data:
            process.wait()
            return
        *whole, left = (left + data).split(b"\n")
        for line in whole:
            words: dict[str, Value] = json.loads(line)
            yield words


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
