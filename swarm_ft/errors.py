"""Every error this package raises on purpose. It knows no I/O and imports nothing.

SwarmError
├── BadInput                what the user gave; commands exit with 2
│   ├── BadOption           an option's value, or a combination of options
│   │   └── UnsupportedDtype the run's architecture does not compute in a peer's --dtype
│   ├── BadCodec            an unknown codec, or bits out of range
│   ├── BadModel            a model that is missing, unreadable or of an unknown architecture
│   │   ├── ModelUnavailable a peer cannot use the run's model; only its own log says why
│   │   ├── ModelNotAllowed  the owner of a peer does not allow the run's model
│   │   └── NonFiniteWeights a weight of the model is inf or NaN
│   ├── BadDataset          data that is missing, unreadable, of unknown columns or too short
│   ├── BadLayers           layers outside the model, or matching no stage of the run
│   ├── RunMismatch         this side's RunSpec or weights are not those of the run
│   │   └── ModelDiffers     a part of the model here is not the run's
│   ├── PortInUse           a listener's address is taken
│   ├── BadInvite           an invitation that is none, is used up, or is another swarm's
│   ├── OverQuota           more than the coordinator grants one client
│   └── DirectoryUnreachable no bootstrap peer of the DHT answers
├── ProtocolError           what another process said; it loses its stream, never the run
│   ├── MalformedMessage    a field out of bounds
│   ├── BadFrame            a payload that is not what its header says
│   ├── OutOfTurn           a message that the state does not allow
│   └── VersionMismatch     the other side speaks another version of the protocol
├── NotFound                a run, peer or result that is not there
├── NotAllowed              who asks may not: the swarm does not know them, or not for that
├── Unavailable             the other side cannot be reached now; trying again may help
│   ├── Busy                it has as much to do as it takes on; later it may have less
│   └── BuffersLost         what a step was planned with is not kept any more; it is planned anew
├── JournalError            the coordinator's database cannot be read or written
│   └── JournalFull         its disk has no room for another job; runs under way go on
├── BadSnapshot             a saved state that is torn, altered, or of another run, stage or step
├── NonFinite               a loss, activation or gradient is inf or NaN
├── OutOfMemory             a stage asked its GPU for more than there is, or than is lent
├── RunFailed               the run ended without a result
└── InternalError           our bug; peers learn no detail
"""

from __future__ import annotations


class SwarmError(Exception):
    """Root of the tree. `code` is stable: it crosses the wire and appears in `--json`.

    Attributes:
        message: for people.
        private: what only the log of this process says, such as paths; it never crosses the wire.
        about: the peer at the other end of the link that failed; None if none did.
    """

    code = "swarm-error"

    def __init__(self, message: str, *, private: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.private = private
        self.about: str | None = None


class BadInput(SwarmError):
    """The user asked for something that cannot be done; nothing was begun."""

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

    Whoever submits a job learns no more: whether a file is missing, forbidden or unreadable at
    another machine is not a client's business. The peer's log has the reason.
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
    """This side works by another RunSpec, or found other weights, than the run's."""

    code = "run-mismatch"


class ModelDiffers(RunMismatch):
    """A part of the model here is not the run's; the message names the part, and no content."""

    code = "model-differs"


class PortInUse(BadInput):
    """The address to listen on is taken."""

    code = "port-in-use"


class BadInvite(BadInput):
    """The invitation is none, was altered, is used up or revoked, or is another swarm's."""

    code = "bad-invite"


class OverQuota(BadInput):
    """A client has as much at the coordinator as one client may have; nothing was taken in."""

    code = "over-quota"


class DirectoryUnreachable(BadInput):
    """None of `--initial-peers` answered in time."""

    code = "dht-unreachable"


class ProtocolError(SwarmError):
    """Another process broke the protocol."""

    code = "protocol-error"


class MalformedMessage(ProtocolError):
    """A message has a field out of its bounds, or lacks one."""

    code = "malformed-message"


class BadFrame(ProtocolError):
    """A frame's payload is not what its header promises."""

    code = "bad-frame"


class OutOfTurn(ProtocolError):
    """A well-formed message that the present state does not allow."""

    code = "out-of-turn"


class VersionMismatch(ProtocolError):
    """The other side speaks another version of the protocol; trying again does not help."""

    code = "version-mismatch"


class NotFound(SwarmError):
    """The run, peer or result asked for is not known here."""

    code = "not-found"


class NotAllowed(SwarmError):
    """Whoever asks is unknown to the swarm, or may not ask for this; asking again does not help."""

    code = "not-allowed"


class Unavailable(SwarmError):
    """The other side cannot be reached now; trying again may help."""

    code = "unavailable"


class Busy(Unavailable):
    """The other side is there, and has as much to do as it takes on; try again later."""

    code = "busy"


class BuffersLost(Unavailable):
    """What a step was planned with is not kept here any more; planned anew, it goes without."""

    code = "buffers-lost"


class JournalError(SwarmError):
    """The coordinator's journal cannot be read or written."""

    code = "journal-error"


class JournalFull(JournalError):
    """The coordinator's disk has no room for another job; what there is, is left to runs."""

    code = "journal-full"


class BadSnapshot(SwarmError):
    """A saved state is torn, altered, or not that of the run, stage or step asked for."""

    code = "bad-snapshot"


class NonFinite(SwarmError):
    """A loss, activation or gradient is infinite or not a number."""

    code = "non-finite"


class OutOfMemory(SwarmError):
    """A stage asked its GPU for more memory than there is, or than the peer lends."""

    code = "out-of-memory"


class RunFailed(SwarmError):
    """The run ended without a result."""

    code = "run-failed"


class InternalError(SwarmError):
    """A bug on the other side; it tells no detail."""

    code = "internal"


def _leaves(base: type[SwarmError]) -> dict[str, type[SwarmError]]:
    found = {base.code: base}
    for child in base.__subclasses__():
        found.update(_leaves(child))
    return found


BY_CODE: dict[str, type[SwarmError]] = _leaves(SwarmError)


def from_code(code: str, message: str) -> SwarmError:
    """The error that `code` names, as it arrived from another process.

    An unknown code (a newer peer) becomes a plain `SwarmError`.
    """
    return BY_CODE.get(code, SwarmError)(message)
