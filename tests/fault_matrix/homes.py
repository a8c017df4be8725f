"""Cells of homes: what the net does beneath a run whose peers and client are behind routers.

Each has an internet of its own (`benchmarks.lab.homes`, for root alone), and the losses of the same
swarm on one machine, to the last digit. `forget`: a router loses its table of connections, `move`:
and its address. `home:relay:drop`: the relay and the coordinator, which are one process, lose all
connections as a commit is sent. `home:relay:kill`: a relay that is a process of its own, and
nearer than the coordinator's, in the middle of a step. `home:coordinator:away`: killed, and back on
its journal.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired

from benchmarks.lab.homes import Home, Internet, Nat, why_not
from swarm_ft.client.demo_input import DemoInput, write_demo_input
from tests.fault_matrix.cells import Cell, Fault
from tests.fault_matrix.trial import Outcome
from tests.town import DELAYED, Town, Trouble

NUM_STEPS = 200
AWAY_S = 60.0
FAULT_PART = 2
"""Tenths of the run that are done when it happens."""
_PUNCHED: tuple[Nat, Nat, Nat] = ("cone", "cone", "symmetric")
"""Homes of the two peers, and of the client."""
_KINDS: Mapping[str, tuple[Nat, Nat, Nat]] = {
    # Two symmetric routers leave no way but the relay.
    "relay": ("symmetric", "symmetric", "cone")
}


def why_no_homes() -> str:
    """Why these cells cannot be run here, in a line; empty: they can."""
    return why_not(Home(link=DELAYED))


@dataclass(slots=True)
class Homes:
    """See the module's docstring.

    Attributes:
        away_s: how long a coordinator is.
    """

    folder: Path
    away_s: float
    _sample: DemoInput | None = None
    _quiet: tuple[float, ...] = ()

    def outcome(self, cell: Cell) -> Outcome:
        """Run one cell; this blocks for a minute."""
        sample = self._sample = self._sample or write_demo_input(
            self.folder / "input", seed=1, num_layers=3, hidden_size=32, vocab_size=300
        )
        self._quiet = self._quiet or _losses(Town(self.folder / "quiet"), sample)
        with Internet() as internet:
            return _Trial(cell, self.folder / str(cell), self.away_s, internet).outcome(
                sample, self._quiet
            )


class _Trial:
    """One run, and what happens to it."""

    def __init__(self, cell: Cell, folder: Path, away_s: float, internet: Internet) -> None:
        self._cell = cell
        self._away_s = away_s
        self._fault_s = self._recovered_s = math.nan
        kinds = _KINDS.get(cell.phase, _PUNCHED)
        public, peer, other, client = (
            internet.household(Home(nat, link=DELAYED)) for nat in ("open", *kinds)
        )
        self._peer, self._client = peer.router, client.router
        machines = [house.machines[0] for house in (public, peer, other, client)]
        has_relay = (cell.phase, cell.fault) == ("relay", Fault.KILL)
        self._town = Town(
            *(folder, machines[0], (machines[1], machines[2]), machines[3]),
            relay=internet.household(Home("open")).machines[0] if has_relay else None,
        )

    def outcome(self, sample: DemoInput, quiet: tuple[float, ...]) -> Outcome:
        """Run the trial and return its outcome."""
        troubles = (
            Trouble(FAULT_PART, self._fault),
            Trouble(FAULT_PART + 1, self._is_over),
        )
        try:
            losses = _losses(self._town, sample, troubles)
        except (AssertionError, TimeoutExpired) as error:
            log = json.dumps(self._town.said(), indent=1)
            (self._town.folder / "said.json").write_text(log, encoding="utf-8")
            return Outcome(cell=self._cell, problem=str(error).partition("\n")[0])
        pairs = zip(losses, quiet, strict=True)
        difference = max(abs(loss - other) / abs(other) for loss, other in pairs)
        return Outcome(
            cell=self._cell,
            recovery_s=self._recovered_s - self._fault_s,
            difference=difference,
            problem="" if losses == quiet else "losses differ",
        )

    def _fault(self, town: Town) -> None:
        self._fault_s = time.monotonic()
        match self._cell.phase, self._cell.fault:
            case "peer", Fault.FORGET:
                self._peer.flush_connections()
            case "peer", Fault.MOVE:
                self._peer.change_address()
            case "client", Fault.FORGET:
                self._client.flush_connections()
            case "relay", Fault.DROP:
                town.order("drop")
            case "relay", Fault.KILL:
                town.kill_relay()
            case "coordinator", Fault.AWAY:
                town.kill_coordinator()
                time.sleep(self._away_s)
                town.start_coordinator()

    def _is_over(self, _town: Town) -> None:
        self._recovered_s = time.monotonic()


def _losses(town: Town, sample: DemoInput, troubles: Sequence[Trouble] = ()) -> tuple[float, ...]:
    report = town.train(sample, NUM_STEPS, troubles)
    return tuple(report["losses"])
