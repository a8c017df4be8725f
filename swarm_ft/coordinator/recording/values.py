"""Values of a recording as JSON. Pure.

Messages of peers, and a run's spec, are stored as the bytes in which they travel (protobuf, in
base64). All other values are the coordinator's own.
"""

from __future__ import annotations

from functools import partial
from typing import get_args

from swarm_ft.coordinator.recording.earlier import UPGRADES
from swarm_ft.coordinator.values import Serialiser
from swarm_ft.protocol.messages.control import FromPeer
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.protocol.wire.earlier import any_message, any_spec
from swarm_ft.transport.methods import JOIN

KEYS = frozenset({"storage_key"})
"""Fields that are not written, and are empty after reading."""
MEMOS = frozenset({"memo"})
"""Fields that hold cached answers, which are computed again."""
RECORDED = Serialiser(
    left_out=KEYS | MEMOS,
    wires={
        **dict.fromkeys(
            get_args(FromPeer), (JOIN.request.to_bytes, partial(any_message, JOIN.request))
        ),
        RunSpec: (RUN_SPEC.to_bytes, any_spec),
    },
    upgrades=UPGRADES,
)
"""Serialiser of recordings."""
