"""Format of logs, for people and for programs."""

import json
import logging
import re
from collections.abc import Iterator

import pytest

from swarm_ft.base import log

logger = log.get_logger("swarm_ft.tests.log")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    package = logging.getLogger(log.ROOT)
    before = (package.level, package.propagate, package.handlers[:])
    yield
    log.use_format("text")
    package.level, package.propagate, package.handlers = before


def test_lines_for_people_are_dated(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("INFO")
    logger.info("run %s: step %d of %d", "run-1", 3, 40)
    logger.debug("not told")
    line = capsys.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I run run-1: step 3 of 40\n", line)


def test_json_has_the_time_and_what_a_line_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("INFO")
    log.use_format("json")
    logger.warning("run %s: %d %% done, peer %s is gone", "run-1", 30, "amber")
    logger.info("peer %s joined from %s: %s (%s)", "beryl", "there", "layers auto", "no limits")
    logger.info("no arguments: run 100%")
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("unix_s") == pytest.approx(second.pop("unix_s"), abs=60)
    assert first == {
        "level": "warning",
        "logger": "swarm_ft.tests.log",
        "message": "run run-1: 30 % done, peer amber is gone",
        "run": "run-1",
        "peer": "amber",
    }
    assert (second.get("run"), second["peer"]) == (None, "beryl")
    assert {"run", "peer"}.isdisjoint(third)


def test_json_has_what_was_raised_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("INFO")
    log.use_format("json")
    try:
        raise ValueError("of two\nlines")
    except ValueError:
        logger.exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: of two\nlines")


def test_a_module_that_logs_what_callers_do_writes_few_lines_a_second() -> None:
    limited, written = log.get_logger("swarm_ft.tests.limited", lines_per_s=2), list[str]()

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    limited.addHandler(Kept())
    limited.setLevel("INFO")
    for millisecond in range(3_000):
        record = limited.makeRecord("x", logging.WARNING, "f", 1, "%s", ("full",), None)
        record.created = 1_000.0 + millisecond / 1000
        limited.handle(record)
    later = "full (998 lines before this were left out)"
    assert written == ["full", "full", later, "full", later, "full"]
