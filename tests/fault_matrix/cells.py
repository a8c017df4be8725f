"""The cells of the matrix: which process, in which phase, meets which fault. Values only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch

from swarm_ft.errors import BadOption


class Role(StrEnum):
    """The victim of a fault. A stage's peer has a replica, but for LONE."""

    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"
    LONE = "lone"
    NEWCOMER = "newcomer"
    SOURCE = "source"
    COORDINATOR = "coordinator"
    CLIENT = "client"
    DHT = "dht"
    HOME = "home"
    """The net beneath a run from home, see `homes`; the phase says what of it."""

    @property
    def is_peer(self) -> bool:
        """Whether it hosts a stage."""
        return self not in (Role.COORDINATOR, Role.CLIENT, Role.DHT, Role.HOME)


class Fault(StrEnum):
    """The fault that the victim suffers."""

    KILL = "kill"
    STOP = "stop"
    DROP = "drop"
    FORGET = "forget"
    MOVE = "move"
    AWAY = "away"


PHASES = {
    "before-forward": 9,
    "mid-frame": 9,
    "before-ack": 9,
    "before-backward": 9,
    "mid-backward": 9,
    "mid-weights": 9,
    "after-backward": 3,
    "mid-reduce": 5,
    "before-ready": 3,
    "commit-heard": 3,
    "handing-over": 3,
    "joining": 1,
    "saving": 2,
    "commit-written": 3,
    "commit-said": 9,
    "snapshot-saved": 2,
}
"""Points in the code, and the how-manieth time of reaching them is used: after a step or two."""
_STAGE = tuple(PHASES)[:10]
_ALONE = ("before-forward", "mid-backward", "before-ready", "commit-heard", "saving")
OWN_POINTS = ("commit-written", "commit-said", "snapshot-saved")
"""The coordinator reaches these; at the others a peer waits while somebody else meets the fault."""
_PHASES_OF = {
    Role.FIRST: _STAGE,
    Role.MIDDLE: _STAGE,
    # Its forward and backward are one task, with nothing between them.
    Role.LAST: tuple(phase for phase in _STAGE if phase != "before-backward"),
    Role.LONE: _ALONE,
    Role.NEWCOMER: ("joining",),
    Role.SOURCE: ("handing-over",),
    Role.COORDINATOR: (*OWN_POINTS, *_STAGE),
    Role.CLIENT: ("mid-backward", "commit-heard"),
    Role.DHT: ("mid-backward", "commit-heard"),
}


_OF_PROCESSES = (Fault.KILL, Fault.STOP, Fault.DROP)
_OF_HOMES = (
    ("peer", Fault.FORGET),
    ("peer", Fault.MOVE),
    ("client", Fault.FORGET),
    ("relay", Fault.DROP),
    ("relay", Fault.KILL),
    ("coordinator", Fault.AWAY),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One of the matrix, `role:phase:fault` in short."""

    role: Role
    phase: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.role}:{self.phase}:{self.fault}"

    @property
    def is_self_inflicted(self) -> bool:
        """Whether the process that reaches the point is the one that meets the fault."""
        return self.role.is_peer or self.phase in OWN_POINTS


def all_cells() -> Iterator[Cell]:
    """The whole matrix, in the order of its table."""
    for role, phases in _PHASES_OF.items():
        for phase in phases:
            for fault in _OF_PROCESSES:
                cell = Cell(role, phase, fault)
                # From outside, a process can be killed and frozen, but not be cut off.
                if cell.is_self_inflicted or fault is not Fault.DROP:
                    yield cell
    yield from (Cell(Role.HOME, phase, fault) for phase, fault in _OF_HOMES)


def chosen_cells(patterns: Sequence[str]) -> tuple[Cell, ...]:
    """Cells that match one of the patterns, `middle:mid-*:kill` for example; all without any.

    Raises:
        BadOption: a pattern matches none.
    """
    cells = tuple(all_cells())
    for pattern in patterns:
        if not any(fnmatch(str(cell), pattern) for cell in cells):
            raise BadOption(f"--cells {pattern}: no such cell; for example {cells[0]}")
    return tuple(c for c in cells if not patterns or any(fnmatch(str(c), p) for p in patterns))
