from swarm_ft.proto import boundary_pb2 as _boundary_pb2
from swarm_ft.proto import reduce_pb2 as _reduce_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
