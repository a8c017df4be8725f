"""Faults as they happen to a simulated swarm: each begins, and each ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from tests.simulation.machines import Machine, PeerRole, World
from tests.simulation.scenario import TAMPERING, Fault, FaultKind
from tests.simulation.tampering import Habit

MAX_CLOCK_JUMP_S = 90.0
MAX_SLOWNESS = 50.0


class Injector:
    """Carries out faults.

    Args:
        machines: by name.
        roles: of the peers' machines.
        add_peer: starts one more peer that offers these layers.
    """

    def __init__(
        self,
        world: World,
        machines: dict[str, Machine],
        roles: dict[str, PeerRole],
        add_peer: Callable[[str], None],
    ) -> None:
        self._world = world
        self._machines = machines
        self._roles = roles
        self._add_peer = add_peer
        self._waiting: dict[str, list[Fault]] = {}
        self.num_active = 0
        self.happened: Counter[str] = Counter()
        world.invariants.on_moment = self._on_moment

    def expect(self, faults: Sequence[Fault]) -> None:
        """Let these faults happen when their time comes."""
        for fault in faults:
            self._world.network.wires.at(fault.at_s, partial(self._arm, fault))

    def _arm(self, fault: Fault) -> None:
        if fault.moment is None:
            self._strike(fault)
        else:
            self._waiting.setdefault(fault.moment, []).append(fault)

    def _on_moment(self, moment: str) -> None:
        for fault in self._waiting.pop(moment, ()):
            self._world.loop.soon(fault.turns, partial(self._strike, fault))

    def _strike(self, fault: Fault) -> None:
        self.num_active += 1
        self.happened[str(fault.kind)] += 1
        self.begin(fault)
        over_s = self._world.loop.time() + fault.duration_s
        self._world.network.wires.at(over_s, partial(self._pass, fault))

    def _pass(self, fault: Fault) -> None:
        self.num_active -= 1
        self.end(fault)

    def begin(self, fault: Fault) -> None:
        """It goes wrong."""
        self._world.trace.say(f"FAULT {fault}")
        machine = self._machines.get(fault.machine)
        match fault.kind:
            case FaultKind.JOIN:
                self._add_peer(fault.other)
            case FaultKind.CRASH | FaultKind.REPLACED | FaultKind.POWER_CUT if machine:
                machine.kill(silently=fault.kind is FaultKind.POWER_CUT)
            case FaultKind.LEAVE if machine:
                self._leave(fault.machine)
            case FaultKind.PAUSE if machine and machine.process:
                machine.process.pause()
                self._world.network.wires.look()
            case FaultKind.SLOW if machine and machine.process:
                machine.process.slowness = 1 + fault.amount * MAX_SLOWNESS
            case FaultKind.FULL_DISK if machine:
                machine.disk.is_full = True
            case FaultKind.CLOCK_JUMP if machine:
                machine.clock.ahead_s += fault.amount * MAX_CLOCK_JUMP_S
            case kind if kind in TAMPERING:
                self._tamper(fault, 0.05 + fault.amount / 2)
            case _:
                self._disturb(fault, is_wrong=True)

    def end(self, fault: Fault) -> None:
        """It goes right again."""
        self._world.trace.say(f"over: {fault.kind} {fault.machine} {fault.other}")
        machine = self._machines.get(fault.machine)
        match fault.kind:
            case FaultKind.CRASH | FaultKind.POWER_CUT if machine:
                machine.start()
            case FaultKind.REPLACED | FaultKind.LEAVE if machine:
                machine.come_back()
            case FaultKind.PAUSE if machine and machine.process:
                machine.process.resume()
                self._world.network.wires.look()
            case FaultKind.SLOW if machine and machine.process:
                machine.process.slowness = 1.0
            case FaultKind.FULL_DISK if machine:
                machine.disk.is_full = False
            case kind if kind in TAMPERING:
                self._tamper(fault, 0.0)
            case _:
                self._disturb(fault, is_wrong=False)

    def _leave(self, name: str) -> None:
        node = self._roles[name].node
        if node is not None and self._machines[name].process is not None:
            node.leave()

    def _tamper(self, fault: Fault, probability: float) -> None:
        habits = self._world.network.observed.tamperer.habits
        for other in self._machines:
            pair = (fault.machine, other)
            habits[pair] = replace(habits.get(pair, Habit()), **{str(fault.kind): probability})

    def _disturb(self, fault: Fault, *, is_wrong: bool) -> None:
        wires = self._world.network.wires
        match fault.kind:
            case FaultKind.PARTITION | FaultKind.ISOLATED | FaultKind.ONE_WAY:
                for source, target in self._blocked_by(fault):
                    wires.link(source, target).blocked = is_wrong
                if fault.kind is FaultKind.ISOLATED:
                    self._set_isolated(fault.machine, is_isolated=is_wrong)
            case FaultKind.CUT if is_wrong:
                for connection in wires.between(fault.machine, fault.other):
                    connection.sever()
            case FaultKind.STALL if is_wrong:
                for connection in wires.between(fault.machine, fault.other):
                    connection.stalled = True
            case FaultKind.THIN_LINK:
                factor = 1 + 100 * fault.amount
                for pair in ((fault.machine, fault.other), (fault.other, fault.machine)):
                    link = wires.link(*pair)
                    link.latency_s *= (
                        1 + 4 * fault.amount if is_wrong else 1 / (1 + 4 * fault.amount)
                    )
                    link.bytes_per_s *= 1 / factor if is_wrong else factor
            case _:
                pass
        wires.look()

    def _set_isolated(self, name: str, *, is_isolated: bool) -> None:
        if is_isolated:
            self._world.isolated.add(name)
        else:
            self._world.isolated.discard(name)

    def _blocked_by(self, fault: Fault) -> Iterator[tuple[str, str]]:
        others = self._machines if fault.kind is FaultKind.ISOLATED else (fault.other,)
        for other in others:
            if other != fault.machine:
                yield fault.machine, other
                if fault.kind is not FaultKind.ONE_WAY:
                    yield other, fault.machine
