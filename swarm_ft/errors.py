"""Errors that this package raises on purpose. The module does no I/O and imports nothing.

SwarmError
├── BadInput                a request of the user that cannot work; commands exit with 2
│   ├── BadOption           an option's value, or a combination of options
│   │   └── UnsupportedDtype the run's architecture does not compute in a peer's --dtype
│   ├── BadCodec            an unknown codec, or bits out of range
│   ├── BadModel            a model that is missing, unreadable or of an unknown architecture
│   │   ├── ModelUnavailable a peer cannot use the run's model; only its own log names the reason
│   │   ├── ModelNotAllowed  the owner of a peer does not allow the run's model
│   │   └── NonFiniteWeights a weight of the model is inf or NaN
│   ├── BadDataset          data that is missing, unreadable, of unknown columns or too short
│   ├── BadLayers           layers outside the model, or matching no stage of the run
│   ├── RunMismatch         this side's RunSpec or weights differ from those of the run
│   │   └── ModelDiffers     a part of the local model differs from the run's
│   ├── PortInUse           a listener's address is taken
│   ├── BadInvite           an invitation that is malformed, used up, or another swarm's
│   ├── OverQuota           more than the coordinator grants one client
│   └── DirectoryUnreachable no bootstrap peer of the DHT answers
├── ProtocolError           a violation by another process; it loses its stream, never the run
│   ├── MalformedMessage    a field out of bounds
│   ├── BadFrame            a payload that contradicts its header
│   ├── OutOfTurn           a message that the state does not allow
│   └── VersionMismatch     the other side has another version of the protocol
├── NotFound                a run, peer or result that does not exist
├── NotAllowed              a caller that the swarm does not know, or not in the needed role
├── Unavailable             the other side cannot be reached now; a retry may help
│   ├── Busy                the other side is at its limit of work; retry later
│   └── BuffersLost         buffers that a step's plan needs are gone; a new plan goes without them
├── JournalError            the coordinator's database cannot be read or written
│   └── JournalFull         the disk has no room for another job; runs under way continue
├── BadSnapshot             a saved state that is torn, altered, or of another run, stage or step
├── NonFinite               a loss, activation or gradient is inf or NaN
├── OutOfMemory             a stage needs more GPU memory than there is, or than the peer lends
├── RunFailed               the run ended without a result
└── InternalError           our bug; peers learn no detail
"""

from __future__ import annotations


class SwarmError(Exception):
    """Root of the tree. `code` is stable: it crosses the wire and appears in `--json`.

    Attributes:
        message: Text for people.
        private: Text for this process's log alone, such as paths; it never crosses the wire.
        about: Name of the peer at the other end of the failed link; None if no link failed.
    """

    code = "swarm-error"

    def __init__(self, message: str, *, private: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.private = private
        self.about: str | None = None


class BadInput(SwarmError):
    """A request of the user cannot work; nothing has begun."""

    code = "bad-input"


class BadOption(BadInput):
    """An option's value is out of range, or options contradict each other."""

    code = "bad-option"


class UnsupportedDtype(BadOption):
    """The run's architecture does not compute in the dtype that the peer's owner chose."""

    code = "unsupported-dtype"


class BadCodec(BadInput):
    """A codec spec names no codec, or bits the codec does not have."""

    code = "bad-codec"


class BadModel(BadInput):
    """The model is missing, unreadable or of an architecture that cannot be cut."""

    code = "bad-model"


class ModelUnavailable(BadModel):
    """A peer cannot use the run's model.

    The client learns no more: whether a file is missing, forbidden or unreadable at another machine
    is not its business. The peer's log names the reason.
    """

    code = "model-unavailable"


class ModelNotAllowed(BadModel):
    """The owner of a peer has a list of allowed models, and the run's is not on it."""

    code = "model-not-allowed"


class NonFiniteWeights(BadModel):
    """A weight of the model is infinite or not a number, so nothing can be learned with it."""

    code = "non-finite-weights"


class BadDataset(BadInput):
    """The data is missing, unreadable, not of a known form, or shorter than one sample."""

    code = "bad-dataset"


class BadLayers(BadInput):
    """Layers that do not parse, lie outside the model, or match no stage of the run."""

    code = "bad-layers"


class RunMismatch(BadInput):
    """This side has another RunSpec, or other weights, than the run."""

    code = "run-mismatch"


class ModelDiffers(RunMismatch):
    """A part of the local model differs from the run's; the message names the part alone."""

    code = "model-differs"


class PortInUse(BadInput):
    """The address to listen on is taken."""

    code = "port-in-use"


class BadInvite(BadInput):
    """The invitation is malformed, altered, used up, revoked, or of another swarm."""

    code = "bad-invite"


class OverQuota(BadInput):
    """A client is at the coordinator's limit for one client; the coordinator accepted nothing."""

    code = "over-quota"


class DirectoryUnreachable(BadInput):
    """No address of `--initial-peers` answered in time."""

    code = "dht-unreachable"


class ProtocolError(SwarmError):
    """Another process broke the protocol."""

    code = "protocol-error"


class MalformedMessage(ProtocolError):
    """A message has a field out of its bounds, or lacks one."""

    code = "malformed-message"


class BadFrame(ProtocolError):
    """A frame's payload contradicts its header."""

    code = "bad-frame"


class OutOfTurn(ProtocolError):
    """A well-formed message that the present state does not allow."""

    code = "out-of-turn"


class VersionMismatch(ProtocolError):
    """The other side has another version of the protocol; a retry does not help."""

    code = "version-mismatch"


class NotFound(SwarmError):
    """The requested run, peer or result does not exist in this process."""

    code = "not-found"


class NotAllowed(SwarmError):
    """The swarm does not know the caller, or its role may not do this; a retry does not help."""

    code = "not-allowed"


class Unavailable(SwarmError):
    """The other side cannot be reached now; a retry may help."""

    code = "unavailable"


class Busy(Unavailable):
    """The other side is reachable and at its limit of work; retry later."""

    code = "busy"


class BuffersLost(Unavailable):
    """Buffers that a step's plan needs are gone from a peer; the next plan goes without them."""

    code = "buffers-lost"


class JournalError(SwarmError):
    """The coordinator's journal cannot be read or written."""

    code = "journal-error"


class JournalFull(JournalError):
    """The coordinator's disk has no room for another job; the rest of it is for runs under way."""

    code = "journal-full"


class BadSnapshot(SwarmError):
    """A saved state is torn, altered, or of another run, stage or step than requested."""

    code = "bad-snapshot"


class NonFinite(SwarmError):
    """A loss, activation or gradient is infinite or not a number."""

    code = "non-finite"


class OutOfMemory(SwarmError):
    """A stage needs more GPU memory than there is, or than the peer lends."""

    code = "out-of-memory"


class RunFailed(SwarmError):
    """The run ended without a result."""

    code = "run-failed"


class InternalError(SwarmError):
    """A bug on the other side, which sends no detail."""

    code = "internal"


def _leaves(base: type[SwarmError]) -> dict[str, type[SwarmError]]:
    found = {base.code: base}
    for child in base.__subclasses__():
        found.update(_leaves(child))
    return found


BY_CODE: dict[str, type[SwarmError]] = _leaves(SwarmError)


def from_code(code: str, message: str) -> SwarmError:
    """Return the error that `code` names, as it arrived from another process.

    An unknown code, of a newer peer, becomes a plain `SwarmError`.
    """
    return BY_CODE.get(code, SwarmError)(message)
