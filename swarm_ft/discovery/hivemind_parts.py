"""Parts of hivemind that a DHT node needs, imported without the rest.

`import hivemind` imports its averaging, optimizers and mixtures of experts, and scipy for these:
0.6 s of a core without a use here. So the package's own `__init__` runs at the first use of one of
its names, and not for its submodules.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


class _DeferredPackage(ModuleType):
    """A package whose `__init__` runs at the first use of a name that is no imported submodule."""

    def __getattr__(self, name: str) -> object:
        submodule = sys.modules.get(f"{self.__name__}.{name}")
        if submodule is not None:
            return submodule
        spec = self.__spec__
        if spec is None or spec.loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment] # a module may change its class
        spec.loader.exec_module(self)
        return getattr(self, name)


def _defer(name: str) -> None:
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is not None:
        package: ModuleType = importlib.util.module_from_spec(spec)
        package.__class__ = _DeferredPackage
        sys.modules[name] = package


_defer("hivemind")

from hivemind.dht.node import DHTNode  # noqa: E402 - see the module's docstring
from hivemind.dht.protocol import ValidationError  # noqa: E402
from hivemind.dht.validation import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.p2p import P2P, P2PDaemonError, PeerID  # noqa: E402
from hivemind.utils import get_dht_time  # noqa: E402
from hivemind.utils.logging import use_hivemind_log_handler  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

__all__ = [
    "P2P",
    "DHTNode",
    "DHTRecord",
    "Multiaddr",
    "P2PDaemonError",
    "PeerID",
    "RecordValidatorBase",
    "ValidationError",
    "get_dht_time",
    "use_hivemind_log_handler",
]
