"""A digest of a stage's state: equal states have equal digests."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from swarm_ft.digest import digest_of
from swarm_ft.stage.base import Engine
from swarm_ft.stage.tensor_files import AnyTensor, TensorDigest, pieces_of


def tensor_digest(tensor: AnyTensor) -> bytes:
    """See `TensorDigest`."""
    return TensorDigest(tensor).exhausted(pieces_of(tensor)).digest()


def state_digest(state: Mapping[str, Tensor]) -> bytes:
    """Digest of all names, shapes, dtypes and bytes."""
    pairs = ((name.encode(), tensor_digest(state[name])) for name in sorted(state))
    return digest_of(*(part for pair in pairs for part in pair))


def weights_digest(engine: Engine) -> bytes:
    """Digest of a stage's weights alone."""
    state = engine.state()
    return state_digest({name: state[name] for name in state if not name.startswith("adamw/")})
