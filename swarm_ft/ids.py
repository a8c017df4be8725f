"""Names of things, as types of their own, so that one cannot be passed for another."""

from __future__ import annotations

from typing import NewType

RunId = NewType("RunId", str)
PeerId = NewType("PeerId", str)
SampleId = NewType("SampleId", int)
"""A training sequence; stable for the whole run, over epochs and restarts."""
StepNumber = NewType("StepNumber", int)
"""An optimizer step, from 0."""
MicrobatchIndex = NewType("MicrobatchIndex", int)
"""A microbatch inside its step, from 0."""
Attempt = NewType("Attempt", int)
"""Fence: rises each time a run is assigned or planned anew; older messages are void."""
NO_ATTEMPT = Attempt(0)
"""Of a commit that never was; attempts count from 1."""
BlockIndex = NewType("BlockIndex", int)
"""A transformer layer; as a boundary, the cut in front of it."""
