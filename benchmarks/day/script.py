"""The deeds of the ten minutes, and the events that must report each of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Act(Enum):
    """Something that is done to a machine."""

    COMES = "comes"
    PAUSES = "pauses"
    RESUMES = "resumes"
    LEAVES = "leaves"
    FAILS = "fails"
    FREEZES = "freezes"
    THAWS = "thaws"


IN_WORDS = {
    Act.COMES: "comes: `swarm-ft serve-stage`",
    Act.PAUSES: "pauses: `swarm-ft peer pause`",
    Act.RESUMES: "works again: `swarm-ft peer resume`",
    Act.LEAVES: "leaves: Ctrl-C",
    Act.FAILS: "fails: `kill -9`",
    Act.FREEZES: "hangs: `kill -STOP`",
    Act.THAWS: "goes on: `kill -CONT`",
}
REPORTED_AS: dict[Act, tuple[str, ...]] = {
    Act.COMES: ("peer-joined",),
    Act.PAUSES: ("peer-paused",),
    Act.RESUMES: ("peer-resumed",),
    Act.LEAVES: ("peer-leaving", "peer-left"),
    Act.FAILS: ("peer-gone",),
    Act.FREEZES: ("peer-silent", "peer-gone"),
    Act.THAWS: ("peer-joined",),
}
"""Each of these kinds, once for every time that it is done."""


@dataclass(frozen=True, slots=True)
class Cue:
    """The time of a deed: both runs have made this part of their steps."""

    part: float
    machine: str
    act: Act


VOLUNTEERS = ("ada", "bob", "cem")
SCRIPT = (
    Cue(0.04, "ada", Act.COMES),
    Cue(0.10, "bob", Act.COMES),
    Cue(0.18, "ada", Act.PAUSES),
    Cue(0.26, "ada", Act.RESUMES),
    Cue(0.32, "cem", Act.COMES),
    Cue(0.40, "bob", Act.FAILS),
    Cue(0.48, "bob", Act.COMES),
    Cue(0.56, "cem", Act.FREEZES),
    Cue(0.56, "cem", Act.THAWS),
    Cue(0.66, "ada", Act.LEAVES),
    Cue(0.74, "owner-1", Act.LEAVES),
    Cue(0.84, "bob", Act.PAUSES),
    Cue(0.90, "bob", Act.RESUMES),
)
