"""The client's machine: hands in a job, watches it, fetches the result and compares it."""

from __future__ import annotations

import asyncio
import secrets

from swarm_ft.client.swarm import SwarmClient
from swarm_ft.errors import SwarmError
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunPhase, RunStatus
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.simulation.machines import Machine
from tests.simulation.quiet_run import sample_tokens

PATIENCE_S = 1.0
"""After which it tries again what did not work."""


class Customer:
    """See the module's docstring; `has_result` once it is there and right.

    Args:
        spec: of its job.
        after_s: how late it comes.
    """

    def __init__(self, spec: RunSpec, after_s: float = 0.0) -> None:
        self.has_result = False
        self._spec = spec
        self._after_s = after_s
        self._run_id = RunId(f"run-{secrets.token_hex(4)}")

    async def __call__(self, machine: Machine) -> None:
        """Go on until the result is there, whatever happens."""
        client = SwarmClient(machine.directory, machine.transport)
        if self._after_s and machine.starts == 1:
            await asyncio.sleep(self._after_s)
        while not self.has_result:
            try:
                await self._try(client, machine)
            except SwarmError as error:
                machine.world.trace.say(f"client: {error.code}: {error.message}")
                await asyncio.sleep(PATIENCE_S)
        machine.is_over = True

    async def _try(self, client: SwarmClient, machine: Machine) -> None:
        run_id = await self._submit(client)
        status = await self._watch(client, machine, run_id)
        if status.phase is not RunPhase.FINISHED:
            machine.world.invariants.fail(f"the run ended as {status.phase.name}: {status.detail}")
            return
        folder = machine.disk.root / secrets.token_hex(4)
        folder.mkdir()
        log = machine.world.trace.say
        paths = await client.fetch_result(status, folder, lambda text: log(f"client: {text}"))
        if paths is None:
            return  # a part of it was lost, and is made again
        machine.world.invariants.fetched(self._spec, b"".join(path.read_bytes() for path in paths))
        self.has_result = True
        await client.acknowledge_result(run_id)

    async def _submit(self, client: SwarmClient) -> RunId:
        """The run; one that was submitted already is the same run."""
        train = self._spec.train
        samples = [sample_tokens(s, train.seq_length) for s in range(train.num_rows)]
        return (await client.submit(self._spec, samples, run_id=self._run_id)).run_id

    async def _watch(self, client: SwarmClient, machine: Machine, run_id: RunId) -> RunStatus:
        last: RunStatus | None = None
        events = client.watch(run_id, lambda trouble: machine.world.trace.say(f"client: {trouble}"))
        async for event in events:
            if isinstance(event, RunStatus):
                last = event
        if last is None:
            raise SwarmError("the coordinator told nothing of the run")
        return last
