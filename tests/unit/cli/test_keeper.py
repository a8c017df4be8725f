"""A peer works at its volunteer's times, and receives each change."""

from __future__ import annotations

from typing import Any

import pytest

from swarm_ft.api.availability_controller import AvailabilityController, parse_availability
from swarm_ft.base.machine_use import CannotTell
from swarm_ft.errors import BadOption
from swarm_ft.peer.availability import Availability, PauseWhen


class Node:
    """A listener of the controller's decisions."""

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.is_draining = False

    def pause(self, reason: str) -> None:
        self.changes.append(reason)

    def resume(self) -> None:
        self.changes.append("resume")


def keeper_of(node: Node, **options: Any) -> AvailabilityController:
    keeper = AvailabilityController(Availability(), **options)
    keeper.node = node  # type: ignore[assignment]
    return keeper


def test_who_is_asked_pauses_once_and_goes_on_once() -> None:
    node = Node()
    keeper = keeper_of(node)
    for to_pause in (True, True, False, False):
        keeper.request_pause(to_pause=to_pause)
    assert node.changes == ["its volunteer asked for it", "resume"]


def test_who_resumes_while_the_month_is_used_up_pauses_for_that() -> None:
    node = Node()
    keeper = keeper_of(node, used_up=lambda: "used up")
    keeper.request_pause(to_pause=True)
    keeper.request_pause(to_pause=False)
    assert node.changes == ["its volunteer asked for it", "used up"]


def test_who_leaves_for_good_is_left_alone() -> None:
    node = Node()
    node.is_draining = True
    keeper_of(node).request_pause(to_pause=True)
    assert node.changes == []


def test_what_a_system_cannot_tell_is_refused_before_a_peer_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot() -> bool:
        raise CannotTell("no battery")

    monkeypatch.setattr("swarm_ft.base.machine_use.on_battery", cannot)
    with pytest.raises(BadOption, match="on-battery: this system cannot detect it: no battery"):
        parse_availability(None, ("on-battery",))
    monkeypatch.setattr("swarm_ft.base.machine_use.user_active", lambda: False)
    assert parse_availability(None, ("user-active",)).pause_when == (PauseWhen.USER_ACTIVE,)
    both = parse_availability(None, ("user-active", "on-battery"))
    assert both.pause_when == (PauseWhen.USER_ACTIVE,)
    assert "on-battery: this system cannot detect it: no battery; ignoring this" in caplog.text
