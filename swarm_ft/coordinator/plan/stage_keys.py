"""Keys with which a run's peers encrypt their files, all derived from the run's own key.

Each stage of a snapshot has a key, and each peer one for files that it alone reads. From one of
these no other can be derived; the run's own key stays with the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm_ft.base.sealing import derive_key
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import SavedStage
from swarm_ft.protocol.spec.layers import LayerRange


def peer_key(run_key: bytes, peer_id: PeerId) -> bytes:
    """Return the key of files that only this peer reads: buffers, copied states, results.

    Args:
        run_key: Key of the run; empty if it has none.
        peer_id: Peer that gets the key.

    Returns:
        32 bytes; none where the run has no key.
    """
    return derive_key(run_key, f"peer {peer_id}") if run_key else b""


def stage_keys(
    run_key: bytes, layers: LayerRange, saved: Iterable[SavedStage]
) -> dict[LayerRange, bytes]:
    """Return the keys of the stage that a peer writes, and of the saved stages that it starts from.

    Args:
        run_key: Key of the run; empty if it has none.
        layers: Layers of the peer's stage.
        saved: Stages of the snapshot that the run goes back to, with any cuts.

    Returns:
        32 bytes for each of these ranges of layers; none where the run has no key.
    """
    if not run_key:
        return {}
    read = {stage.layers for stage in saved if stage.layers.overlaps(layers)}
    return {stage: derive_key(run_key, f"stage {stage}") for stage in sorted({layers, *read})}
