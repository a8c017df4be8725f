"""Calls whose messages are bytes: a transport does not care what messages are."""

from dataclasses import replace
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue

from swarm_ft.protocol.wire.convert import WireType
from swarm_ft.transport.base import Method
from swarm_ft.transport.methods import JOIN, LINK

RAW: WireType[bytes] = WireType(
    bytes, BytesValue, lambda data: BytesValue(value=data), lambda message: message.value
)
"""As field 1 of a message, which in most of ours is a hello."""


def _raw(method: Method[Any, Any]) -> Method[bytes, bytes]:
    return replace(method, request=RAW, reply=RAW)


BYTES = _raw(LINK)
MORE_BYTES = _raw(JOIN)
