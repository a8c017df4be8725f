"""One server of hivemind with one module, which takes a stage's time.

Prints its DHT addresses when it takes requests, as a line of JSON; stays until its input ends.
"""

from __future__ import annotations

import sys

import torch
from hivemind.moe.server import ModuleBackend, Server
from hivemind.proto.runtime_pb2 import CompressionType
from hivemind.utils.tensor_descr import BatchTensorDescriptor

from benchmarks.slow_network.emulated import EmulatedStage
from benchmarks.slow_network.hivemind_experts import HivemindJob, uid_of
from benchmarks.slow_network.hivemind_node import joined_dht, print_document

HANDLERS = 4
"""Processes that take requests: as many as hivemind recommends for a module."""


def main() -> None:
    """Run the command."""
    job = HivemindJob.from_json(sys.argv[1])
    if job.rank is None:
        raise ValueError("a server needs the rank of its stage")
    dht = joined_dht(job)
    # The server forks while its own thread sends requests to the DHT. A first request takes locks,
    # and a fork that finds one locked waits forever. So the first request comes before the fork.
    maddrs = [str(address) for address in dht.get_visible_maddrs()]
    uid = uid_of(job.rank)
    Server(dht, {uid: _backend(uid, job)}, num_connection_handlers=HANDLERS, start=True)
    print_document(maddrs=maddrs)
    sys.stdin.read()


def _backend(uid: str, job: HivemindJob) -> ModuleBackend:
    work = job.work
    described = BatchTensorDescriptor(
        work.tokens,
        work.channels,
        dtype=torch.float32,
        compression=CompressionType.Value(job.compression),
    )
    # No optimizer: hivemind would step it at every backward pass, which is not the others' work.
    return ModuleBackend(
        name=uid,
        module=EmulatedStage(work.forward_s, work.backward_s),
        args_schema=(described,),
        outputs_schema=described,
        max_batch_size=work.micro_batch_size,
    )


if __name__ == "__main__":
    main()
