"""Keys with which a run's peers encrypt what they write down, all derived from the run's own.

Each stage of a snapshot has one, and each peer one for what it alone reads. Who has one can derive
no other; the run's own stays with the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import SavedStage
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.sealing import derived_key


def peer_key(run_key: bytes, peer_id: PeerId) -> bytes:
    """Of what nobody but this peer reads: buffers, states on their way, results.

    Args:
        run_key: of the run; empty where it has none.
        peer_id: who is to have it.

    Returns:
        32 bytes; none where the run has no key.
    """
    return derived_key(run_key, f"peer {peer_id}") if run_key else b""


def stage_keys(
    run_key: bytes, layers: LayerRange, saved: Iterable[SavedStage]
) -> dict[LayerRange, bytes]:
    """Of what a peer writes of its stage, and of what it reads to take that up; of nothing else.

    Args:
        run_key: of the run; empty where it has none.
        layers: of the peer's stage.
        saved: the snapshot that its run goes back to, however that was cut.

    Returns:
        32 bytes for each of these ranges of layers; none where the run has no key.
    """
    if not run_key:
        return {}
    read = {stage.layers for stage in saved if stage.layers.overlaps(layers)}
    return {stage: derived_key(run_key, f"stage {stage}") for stage in sorted({layers, *read})}
