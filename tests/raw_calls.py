"""Calls whose messages are bytes: a transport does not care what messages are."""

from dataclasses import replace
from typing import Any, cast

from google.protobuf.wrappers_pb2 import BytesValue

from swarm_ft.protocol.wire.convert import WireType
from swarm_ft.transport.base import Method
from swarm_ft.transport.methods import JOIN, LINK

RAW: WireType[bytes] = WireType(
    bytes, BytesValue, lambda data: BytesValue(value=data), lambda message: message.value
)
"""As field 1 of a message, which in most of ours is a hello."""
BYTES: Method[bytes, bytes] = replace(cast(Method[Any, Any], LINK), request=RAW, reply=RAW)
MORE_BYTES: Method[bytes, bytes] = replace(cast(Method[Any, Any], JOIN), request=RAW, reply=RAW)
