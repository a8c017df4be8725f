"""One call of `machine.decide`: the state as it changes, and the effects so far."""

from __future__ import annotations

from swarm_ft.coordinator.effects import (
    Dismiss,
    Effect,
    LedgerRecord,
    MemberRecord,
    Publish,
    Record,
    RunRecord,
    Say,
    Write,
)
from swarm_ft.coordinator.ledger import change_of
from swarm_ft.coordinator.state import Member, Run, SwarmState
from swarm_ft.errors import SwarmError
from swarm_ft.ids import PeerId, RunId, SampleId
from swarm_ft.protocol.coordinator_messages import ToPeer
from swarm_ft.protocol.status import RunEvent


class Turn:
    """What one event makes of a state; whoever decides something tells it here.

    Attributes:
        state: what the coordinator knows by now.
        now_s: monotonic seconds, the same for the whole turn.
        effects: what is to be done, in this order.
    """

    def __init__(self, state: SwarmState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    def keep(self, run: Run) -> None:
        """Keep the run; nobody needs to know, now or after a restart."""
        self.state = self.state.with_run(run)

    def put(self, run: Run) -> None:
        """Keep the run, write it down and tell its watchers."""
        self.keep(run)
        self.write(RunRecord(run))
        self.publish(run.run_id, run.status)

    def write_ledger(self, before: Run, after: Run) -> None:
        """Write down what became of a run's ledger."""
        if after.ledger is not None and after.ledger is not before.ledger:
            self.write(LedgerRecord(after.run_id, change_of(before.ledger, after.ledger)))

    def add_member(self, member: Member) -> None:
        """Keep the member and write it down."""
        self.state = self.state.with_member(member)
        self.write(MemberRecord(member.hello, joined=True))

    def drop_member(self, member: Member) -> None:
        """Do without the member and write that down."""
        self.state = self.state.without_member(member.hello.peer_id)
        self.write(MemberRecord(member.hello, joined=False))

    def write(self, record: Record) -> None:
        """Put a record into the journal; comes before whatever is said about it."""
        self.effects.append(Write(record))

    def say(self, peer_id: PeerId, message: ToPeer, tokens_of: tuple[SampleId, ...] = ()) -> None:
        """Send a message to a peer; a plan goes with the tokens of these samples."""
        self.effects.append(Say(peer_id, message, tokens_of))

    def publish(self, run_id: RunId, event: RunEvent) -> None:
        """Tell everybody who watches the run."""
        self.effects.append(Publish(run_id, event))

    def dismiss(self, peer_id: PeerId, error: SwarmError) -> None:
        """End a peer's membership with an error."""
        self.effects.append(Dismiss(peer_id, error))
