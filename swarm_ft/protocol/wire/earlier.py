"""RunSpecs and messages in journals and recordings of earlier versions, in today's fields.

A field that a version lacked has the meaning of that version. The digest of a run stays the one
that it began with: tokens, states, snapshots and buffers contain it. Some fields were added without
a new version, so several digests are possible for the same bytes; tokens prove the right one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from swarm_ft.errors import MalformedMessage
from swarm_ft.proto import run_pb2
from swarm_ft.protocol.spec.run_spec import (
    MAX_STEPS,
    NO_NONCE,
    VERSION,
    ModelSpec,
    RunSpec,
    TrainSpec,
    digest_of_fields,
)
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.protocol.wire.convert import WireType

T = TypeVar("T")

OLDEST = 8
"""Oldest version that can be read."""
_MEANINGS: dict[str, Any] = {"drain_microbatches": 1}
"""Fields of TrainSpec whose absence does not mean zero."""
_FORMS = (
    (9, ()),
    (9, ("train.end_token_ids",)),
    (8, ("model.nonce", "model.owner")),
    (8, ("train.drain_codec", "train.drain_microbatches")),
    (8, ("train.quality",)),
)
"""Versions, with the fields that each lacked beside those of all before, the newest first."""
MAX_SHOWN_CHARS = 200


def is_earlier(data: bytes) -> bool:
    """Whether these are the bytes of a readable spec of an earlier version.

    Raises:
        MalformedMessage: The bytes are no spec.
    """
    return bool(OLDEST <= _parsed(data).version < VERSION)


def any_spec(data: bytes) -> RunSpec:
    """Return the spec of bytes of any version, with its newest possible digest.

    Raises:
        MalformedMessage: The bytes are no spec, or of a version that cannot be read.
    """
    return next(upgraded_specs(data)) if is_earlier(data) else RUN_SPEC.from_bytes(data)


def upgraded_specs(data: bytes) -> Iterator[RunSpec]:
    """Yield the spec of an earlier version's bytes, once with each possible digest.

    Raises:
        MalformedMessage: A field cannot be read.
    """
    message = _parsed(data)
    version, message.version = message.version, VERSION
    for name, meaning in _MEANINGS.items():
        if not getattr(message.train, name):
            setattr(message.train, name, meaning)
    spec = RUN_SPEC.from_wire(message)
    for digest in _digests(spec, version):
        yield replace(spec, inherited_digest=digest)


def any_message(wire: WireType[T], data: bytes) -> T:
    """Return a message that an earlier version received and checked.

    Raises:
        MalformedMessage: It cannot be read.
    """
    try:
        message = wire.message.FromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes that are not a {wire.name}") from None
    for _, part in message.ListFields():
        if hasattr(part, "protocol_version"):
            part.protocol_version = PROTOCOL_VERSION
    return wire.from_wire(message)


def salvaged_spec(data: bytes, num_steps: int) -> RunSpec:
    """Return a substitute for an unreadable spec, with its model's name and its steps.

    Args:
        data: Bytes of anything.
        num_steps: Steps of the run, at least.
    """
    try:
        message = _parsed(data)
    except MalformedMessage:
        message = run_pb2.RunSpec()
    shown = "".join(filter(str.isprintable, message.model.reference))[:MAX_SHOWN_CHARS]
    steps = min(max(1, num_steps, message.train.num_steps), MAX_STEPS)
    model = ModelSpec(
        reference=shown,
        architecture="",
        num_blocks=1,
        hidden_size=1,
        vocab_size=1,
        block_bytes=0,
        embed_digest=NO_NONCE,
        block_digests=(NO_NONCE,),
        head_digest=NO_NONCE,
        tied_embeddings=False,
    )
    return RunSpec(model=model, train=TrainSpec(num_samples=1, num_steps=steps))


def _parsed(data: bytes) -> Any:  # noqa: ANN401 - a message with the proto's fields
    try:
        return run_pb2.RunSpec.FromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes that are not a RunSpec") from None


def _digests(spec: RunSpec, version: int) -> Iterator[bytes]:
    fields = asdict(spec) | {"version": version}
    del fields["inherited_digest"]
    for form_version, lacking in _FORMS:
        for name in lacking:
            part, _, field = name.partition(".")
            del fields[part][field]
        if form_version == version:
            yield digest_of_fields(fields)
