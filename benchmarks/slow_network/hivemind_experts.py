"""hivemind's own remote modules over a lab's links: a server a stage, and one client.

The client sends every microbatch to each server and back, forward and backward, as clients of
hivemind, Petals and SWARM do: all activations pass its link. A server keeps nothing between the
two passes. So it is sent its input again with the gradient, and computes forward again.
`hivemind_client` and `hivemind_server` are what runs on the hosts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version

from benchmarks.lab import Lab, LabProcesses
from benchmarks.slow_network.meter import read_steps
from benchmarks.slow_network.work import Measured, Network, Trial, Work

CLIENT, SERVER = (f"benchmarks.slow_network.hivemind_{role}" for role in ("client", "server"))
READY_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class RemoteExperts:
    """A setting.

    Attributes:
        compression: of all tensors, by hivemind's name: NONE, FLOAT16, UNIFORM_8BIT and others.
            BLOCKWISE_8BIT needs bitsandbytes.
        in_flight: microbatches that the client has under way at a time, a thread for each.
        client_network: of the client's link; None is like the servers'.
    """

    compression: str = "FLOAT16"
    in_flight: int = 16
    client_network: Network | None = None

    @property
    def name(self) -> str:
        """The name in a table."""
        return f"hivemind {self.compression}" + (", fast client" if self.client_network else "")


@dataclass(frozen=True, kw_only=True)
class HivemindJob:
    """The configuration of client and servers.

    Attributes:
        address: of the host.
        work: as the lab does it.
        rank: of a server's stage.
        initial_peers: of the DHT; the first server begins it.
    """

    address: str
    work: Work
    compression: str
    in_flight: int
    rank: int | None = None
    initial_peers: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Encode as an argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HivemindJob:
        """Parse the text that `to_json` wrote."""
        fields = json.loads(text)
        work, peers = Work(**fields.pop("work")), tuple(fields.pop("initial_peers"))
        return cls(work=work, initial_peers=peers, **fields)


def uid_of(rank: int) -> str:
    """Return the name of a stage in the DHT."""
    return f"stage.{rank}"


def measure_hivemind(lab: Lab, trial: Trial, setting: RemoteExperts) -> Measured:
    """Send one microbatch through to warm up, then take the steps that count.

    Raises:
        RuntimeError: client or server ended before its time.
        TimeoutError: a server took longer than READY_TIMEOUT_S, or a step than STEP_TIMEOUT_S.
    """
    work, network = trial.lab_work, trial.lab_network
    fast = setting.client_network
    client = lab.host((fast.scaled(trial.scale) if fast else network).home_link)
    servers = [lab.host(network.home_link) for _ in range(work.stages)]
    job = HivemindJob(
        address=client.address,
        work=work,
        compression=setting.compression,
        in_flight=setting.in_flight,
    )
    repeats: list[int] = []
    with LabProcesses() as processes:
        for rank, server in enumerate(servers):
            server_job = replace(job, address=server.address, rank=rank)
            processes.start(f"server-{rank}", server, SERVER, server_job.to_json())
            if rank == 0:
                peers = processes.read("server-0", READY_TIMEOUT_S)["maddrs"]
                job = replace(job, initial_peers=tuple(peers))
        for rank in range(1, work.stages):
            processes.read(f"server-{rank}", READY_TIMEOUT_S)
        processes.start("client", client, CLIENT, job.to_json())

        def step() -> float:
            words = processes.request("client", STEP_TIMEOUT_S)
            repeats.append(words["repeats"])
            return float(words["seconds"])

        step()
        reading = read_steps(lab, [client, *servers], step, trial.steps)
    return Measured(
        system=setting.name,
        step_s=tuple(map(trial.imitated_s, reading.step_s)),
        cpus_used=reading.cpus_used,
        forward_bytes=0.0,
        backward_bytes=0.0,
        notes={
            "hivemind": version("hivemind"),
            "in_flight": setting.in_flight,
            "repeated_calls": repeats[-1] - repeats[0],
            "client_sent_bytes": reading.sent_bytes[0],
            "server_sent_bytes": reading.sent_bytes[1:],
        },
    )
