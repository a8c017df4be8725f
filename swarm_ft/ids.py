"""Identifiers as types of their own, so that a type checker finds one in another's place."""

from __future__ import annotations

from typing import NewType

RunId = NewType("RunId", str)
PeerId = NewType("PeerId", str)
SampleId = NewType("SampleId", int)
"""Identifier of a training sequence, stable for the whole run over epochs and restarts."""
StepNumber = NewType("StepNumber", int)
"""Number of an optimizer step, from 0."""
MicrobatchIndex = NewType("MicrobatchIndex", int)
"""Number of a microbatch in its step, from 0."""
Attempt = NewType("Attempt", int)
"""Number of an assignment of a run; it rises each time, and messages of older attempts are void."""
NO_ATTEMPT = Attempt(0)
"""Attempt of a run before its first assignment; attempts count from 1."""
BlockIndex = NewType("BlockIndex", int)
"""Number of a transformer layer; as a boundary, the cut in front of that layer."""
