from swarm_ft.proto import snapshot_pb2 as _snapshot_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToStage(_message.Message):
    __slots__ = ("begin_text", "text_tokens", "text_activation")
    BEGIN_TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    begin_text: BeginText
    text_tokens: TextTokens
    text_activation: TextActivation
    def __init__(self, begin_text: _Optional[_Union[BeginText, _Mapping]] = ..., text_tokens: _Optional[_Union[TextTokens, _Mapping]] = ..., text_activation: _Optional[_Union[TextActivation, _Mapping]] = ...) -> None: ...

class FromStage(_message.Message):
    __slots__ = ("text_activation", "next_token")
    TEXT_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    text_activation: TextActivation
    next_token: NextToken
    def __init__(self, text_activation: _Optional[_Union[TextActivation, _Mapping]] = ..., next_token: _Optional[_Union[NextToken, _Mapping]] = ...) -> None: ...

class BeginText(_message.Message):
    __slots__ = ("name", "max_tokens", "sampling", "protocol_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: _snapshot_pb2.ShardName
    max_tokens: int
    sampling: Sampling
    protocol_version: int
    def __init__(self, name: _Optional[_Union[_snapshot_pb2.ShardName, _Mapping]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class TextTokens(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    def __init__(self, token_ids: _Optional[bytes] = ...) -> None: ...

class TextActivation(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...

class NextToken(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: int
    def __init__(self, token: _Optional[int] = ...) -> None: ...
