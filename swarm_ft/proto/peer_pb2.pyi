from swarm_ft.proto import generation_pb2 as _generation_pb2
from swarm_ft.proto import link_pb2 as _link_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
