"""All members of an all-reduce over streams that break at any moment; hypothesis picks the events.

Tensors are made up: a share is the text "member.piece", a sum the shares' texts in order. So a
share that counts twice, or in another order, shows in the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain, combinations, permutations, repeat
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.codec.sizes import PIECE_ROWS, ROW_VALUES
from swarm_ft.codec.spec import CodecName, CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame, OutOfTurn, ProtocolError
from swarm_ft.ids import Attempt, StepNumber
from swarm_ft.protocol.machines.all_reduce import (
    WINDOW_PIECES,
    AllReduce,
    BreakOff,
    Effects,
    TransmitPiece,
)
from swarm_ft.protocol.messages.reduction import (
    Division,
    EncodeShare,
    GradientPiece,
    Phase,
    PieceAck,
    PieceKey,
    PieceMessage,
    PieceSpan,
    PieceTask,
    SumShares,
    TakeSum,
)
from tests.draws import draws

T = TypeVar("T")
Event = tuple[Callable[[Any], None], Any]

ATTEMPT = Attempt(3)
STEPS = 2
EVENTS = 400
PIECE = PIECE_ROWS * ROW_VALUES
CODEC = CodecSpec(CodecName.NONE, 3200)


def tensor(span: PieceSpan, text: str) -> EncodedTensor:
    return EncodedTensor(CODEC, span.rows, ROW_VALUES, text.encode())


def share_text(member: int, step: int, span: PieceSpan) -> str:
    return f"{member}.{step}.{span.index}"


class Member:
    """A member with its open tasks, which it runs like the shell in `peer.all_reduce`."""

    def __init__(self, index: int, num_members: int, divisions: Sequence[Division]) -> None:
        self.index = index
        self.machine = AllReduce(attempt=ATTEMPT, num_members=num_members, own=index)
        self.divisions = divisions
        self.step = StepNumber(-1)
        self.jobs: deque[PieceTask] = deque()
        self.results: dict[int, str] = {}
        self.streams: dict[int, Stream] = {}

    def begin(self, step: StepNumber) -> None:
        self.step = step
        self.jobs.clear()
        self.results = {}
        self.apply(self.machine.begin(step, self.divisions[step]))

    def other_givers(self) -> list[int]:
        """Return the members whose shares this member adds to its own."""
        return [i for i in self.divisions[self.step].givers if i != self.index]

    def apply(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case TransmitPiece(member, message):
                    if member in self.streams:
                        self.streams[member].send(self.index, message)
                case BreakOff():
                    raise AssertionError(effect)
                case _:
                    self.jobs.append(effect)

    def work(self, number: int) -> None:
        job = self.jobs[number]
        del self.jobs[number]
        self.apply(self.done(job))

    def done(self, job: PieceTask) -> Effects:
        match job:
            case EncodeShare(span):
                text = share_text(self.index, self.step, span)
                return self.machine.encoded(span, tensor(span, text))
            case SumShares(span, shares):
                total = "+".join(share.payload.decode() for share in shares.values())
                self.keep(span, total)
                return self.machine.summed(span, tensor(span, total))
            case TakeSum(span, taken):
                self.keep(span, taken.payload.decode())
                return self.machine.taken(span)

    def refuse(self, number: int) -> None:
        """Refuse an undecodable piece: its stream ends, so that the piece comes again."""
        job = self.jobs[number]
        if isinstance(job, TakeSum):
            other = job.span.owner
            self.machine.sum_refused(job.span)
        else:
            other = self.other_givers()[0]
            self.machine.share_refused(job.span, other)
        del self.jobs[number]
        if other in self.streams:
            self.streams[other].break_off()

    def keep(self, span: PieceSpan, text: str) -> None:
        assert span.index not in self.results, "a piece was taken twice"
        self.results[span.index] = text


class Stream:
    """A connection of two members: messages each way, and those that were read before."""

    def __init__(self, one: Member, other: Member) -> None:
        self.ends = {one.index: one, other.index: other}
        self.to: dict[int, deque[PieceMessage]] = {index: deque() for index in self.ends}
        self.read: dict[int, list[PieceMessage]] = {index: [] for index in self.ends}
        self.unacknowledged: dict[int, dict[Phase, set[PieceKey]]] = {
            index: {phase: set() for phase in Phase} for index in self.ends
        }
        self.is_broken = False

    def other(self, index: int) -> int:
        return next(i for i in self.ends if i != index)

    def connect(self) -> None:
        for index, end in self.ends.items():
            end.streams[self.other(index)] = self
        for index, end in self.ends.items():
            end.apply(end.machine.connected(self.other(index)))

    def break_off(self) -> None:
        self.is_broken = True
        for index, end in self.ends.items():
            if end.streams.get(self.other(index)) is self:
                del end.streams[self.other(index)]
                end.machine.disconnected(self.other(index))

    def send(self, index: int, message: PieceMessage) -> None:
        if isinstance(message, GradientPiece):
            open_pieces = self.unacknowledged[index][message.key.phase]
            assert message.key not in open_pieces, "sent twice on one stream"
            open_pieces.add(message.key)
            assert len(open_pieces) <= WINDOW_PIECES
        self.to[self.other(index)].append(message)

    def deliver(self, index: int) -> None:
        message = self.to[index].popleft()
        self.read[index].append(message)
        if isinstance(message, PieceAck):
            self.unacknowledged[index][message.key.phase].discard(message.key)
        self.receive(index, message)

    def receive(self, index: int, message: PieceMessage) -> None:
        end = self.ends[index]
        end.apply(end.machine.receive(self.other(index), message))


class Simulation:
    """Any order of events that honest members and bad streams can cause; `choices` picks."""

    def __init__(
        self,
        num_members: int,
        num_values: int,
        choices: Sequence[int],
        listening: Sequence[Collection[int]] = ((), ()),
    ) -> None:
        self.divisions = [Division(num_values, num_members, set(those)) for those in listening]
        self.members = [Member(i, num_members, self.divisions) for i in range(num_members)]
        self.streams: dict[tuple[Member, Member], Stream] = {}
        self.choices = chain(choices, repeat(0))
        self.disturbances = len(choices)

    def pick(self, options: Sequence[T]) -> T:
        return options[next(self.choices) % len(options)]

    def progress(self) -> list[Event]:
        """Events of a quiet run."""
        events: list[Event] = []
        for pair in combinations(self.members, 2):
            stream = self.streams.get(pair)
            if stream is None or stream.is_broken:
                events.append((self.connect, pair))
            else:
                events += [(stream.deliver, i) for i, queue in stream.to.items() if queue]
        for member in self.members:
            events += [(member.work, number) for number in range(min(3, len(member.jobs)))]
            if member.step == min(m.step for m in self.members) and self.may_begin():
                events.append((member.begin, StepNumber(member.step + 1)))
        return events

    def disturbance(self) -> list[Event]:
        """Events that must not change anything."""
        events: list[Event] = []
        for stream in self.streams.values():
            if not stream.is_broken:
                events.append((Stream.break_off, stream))
                events += [(self.again, (stream, i)) for i, read in stream.read.items() if read]
        for member in self.members:
            events += [
                (member.refuse, number)
                for number, job in enumerate(member.jobs)
                if isinstance(job, TakeSum)
                or (isinstance(job, SumShares) and member.other_givers())
            ]
        return events

    def again(self, of: tuple[Stream, int]) -> None:
        """A message that was read before comes once more."""
        stream, index = of
        stream.receive(index, self.pick(stream.read[index]))

    def connect(self, pair: tuple[Member, Member]) -> None:
        self.streams[pair] = Stream(*pair)
        self.streams[pair].connect()

    def may_begin(self) -> bool:
        """Return whether a step may begin at a member: the last one is settled everywhere."""
        steps = {member.step for member in self.members}
        if len(steps) > 1:
            return True
        return steps.pop() < STEPS - 1 and all(m.machine.is_settled for m in self.members)

    def run(self) -> list[dict[int, str]]:
        while events := self.progress():
            if self.disturbances > 0:
                events += self.disturbance()
                self.disturbances -= 1
            act, argument = self.pick(events)
            act(argument)
            self.check_begun()
        return [member.results for member in self.members]

    def check_begun(self) -> None:
        steps = [member.step for member in self.members]
        assert max(steps) - min(steps) <= 1


def expected(division: Division, step: int = STEPS - 1) -> dict[int, str]:
    return {
        span.index: "+".join(share_text(i, step, span) for i in division.givers)
        for span in division.spans
    }


def listeners_of(num_members: int) -> st.SearchStrategy[set[int]]:
    """Draw the listeners of a step: any members, as long as one gives a gradient."""
    return st.sets(st.integers(0, num_members - 1), max_size=num_members - 1)


@settings(derandomize=True, deadline=None, max_examples=draws(200))
@given(data=st.data(), num_members=st.integers(1, 5))
def test_every_member_gets_every_sum_of_the_givers_once_in_their_order(
    data: st.DataObject, num_members: int
) -> None:
    simulation = Simulation(
        num_members,
        data.draw(st.integers(0, 8 * PIECE).map(lambda n: 2 * n + 1)),
        data.draw(st.lists(st.integers(0, 1 << 16), max_size=EVENTS)),
        data.draw(
            st.one_of(st.just([()] * STEPS), st.tuples(*[listeners_of(num_members)] * STEPS))
        ),
    )
    results = simulation.run()
    for member in simulation.members:
        assert member.step == STEPS - 1
        assert member.machine.is_settled
    assert results == [expected(simulation.divisions[-1])] * num_members


@pytest.mark.parametrize("listening", [(), {0}, {1}])
def test_a_gradient_of_many_windows_goes_through_them(listening: Collection[int]) -> None:
    simulation = Simulation(2, 200 * PIECE + 1, [], [listening] * STEPS)
    assert simulation.run() == [expected(simulation.divisions[-1])] * 2


@settings(derandomize=True, deadline=None, max_examples=draws(150))
@given(data=st.data(), num_members=st.integers(2, 5), num_events=st.integers(0, 300))
def test_all_that_cannot_go_on_lack_the_one_that_stopped_or_who_does(
    data: st.DataObject, num_members: int, num_events: int
) -> None:
    num_values = data.draw(st.integers(1, 40 * PIECE))
    choices = data.draw(st.lists(st.integers(0, 1 << 16), max_size=EVENTS))
    simulation = Simulation(num_members, num_values, [], [data.draw(listeners_of(num_members))] * 2)
    simulation.choices = chain(choices, repeat(0))
    stopped = simulation.members[data.draw(st.integers(0, num_members - 1))]
    for number in range(EVENTS * num_members**2 * 20):
        events = simulation.progress()
        if number >= num_events:
            events = [(act, of) for act, of in events if not is_of(stopped, act, of)]
        if not events:
            break
        act, argument = simulation.pick(events)
        act(argument)
    lacks = {m.index: set(m.machine.waits_for) for m in simulation.members if m is not stopped}
    for member in simulation.members:
        is_settled = member.machine.is_settled
        if member is not stopped:
            assert is_settled or stopped.index in reached(lacks, member.index)
            assert not lacks[member.index] or not is_settled


def is_of(stopped: Member, act: Callable[[Any], None], argument: Any) -> bool:
    """Whether an event needs an action of this member."""
    owner = getattr(act, "__self__", None)
    return owner is stopped or (isinstance(owner, Stream) and argument == stopped.index)


def reached(lacks: dict[int, set[int]], member: int) -> set[int]:
    found: set[int] = set()
    new = {member}
    while new:
        new = {j for i in new for j in lacks.get(i, ())} - found
        found |= new
    return found


# ---- one member, by hand


def sum_ready(machine: AllReduce, effects: Effects) -> Effects:
    """Encode all requested shares; return all effects that follow."""
    made: Effects = []
    for effect in effects:
        if isinstance(effect, EncodeShare):
            made += machine.encoded(effect.span, tensor(effect.span, f"0.{effect.span.index}"))
        else:
            made.append(effect)
    return made


DIVISION = Division(6 * PIECE + 5, 3)
SHARDS = {i: [span for span in DIVISION.spans if span.owner == i] for i in range(3)}


@pytest.fixture
def machine() -> AllReduce:
    """Member 0 of 3, in step 7, connected, with its own shares encoded."""
    machine = AllReduce(attempt=ATTEMPT, num_members=3, own=0)
    for other in (1, 2):
        machine.connected(other)
    sum_ready(machine, machine.begin(StepNumber(7), DIVISION))
    return machine


def share(
    span: PieceSpan, *, step: int = 7, attempt: int = ATTEMPT, text: str = "share"
) -> GradientPiece:
    return GradientPiece(
        PieceKey(Attempt(attempt), StepNumber(step), Phase.SHARE, span.index), tensor(span, text)
    )


def total(span: PieceSpan, *, step: int = 7, text: str = "sum") -> GradientPiece:
    return GradientPiece(
        PieceKey(ATTEMPT, StepNumber(step), Phase.SUM, span.index), tensor(span, text)
    )


def test_the_order_of_arrival_does_not_show() -> None:
    span = DIVISION.spans[0]
    for order in permutations(range(3)):
        machine = AllReduce(attempt=ATTEMPT, num_members=3, own=0)
        machine.begin(StepNumber(0), DIVISION)
        made: Effects = []
        for member in order:
            text = f"of {member}"
            if member == 0:
                made += machine.encoded(span, tensor(span, text))
            else:
                made += machine.receive(member, share(span, step=0, text=text))
        (effect,) = (e for e in made if isinstance(e, SumShares))
        assert [s.payload for s in effect.shares.values()] == [b"of 0", b"of 1", b"of 2"]


def test_a_share_is_acknowledged_once_its_piece_is_summed(machine: AllReduce) -> None:
    span = SHARDS[0][0]
    assert machine.receive(1, share(span)) == []
    assert machine.receive(1, share(span)) == [], "a second arrival"
    (effect,) = machine.receive(2, share(span))
    assert isinstance(effect, SumShares)
    assert machine.receive(1, share(span)) == machine.receive(2, share(span)) == []
    effects = machine.summed(span, tensor(span, "sum"))
    key = PieceKey(ATTEMPT, StepNumber(7), Phase.SHARE, span.index)
    for member in (1, 2):
        assert TransmitPiece(member, PieceAck(key)) in effects
        assert TransmitPiece(member, total(span)) in effects
        assert machine.receive(member, share(span)) == [TransmitPiece(member, PieceAck(key))]


def test_a_sum_is_acknowledged_once_it_is_taken_in(machine: AllReduce) -> None:
    span = SHARDS[1][0]
    assert machine.receive(1, total(span)) == [TakeSum(span, tensor(span, "sum"))]
    assert machine.receive(1, total(span)) == []
    ack = [TransmitPiece(1, PieceAck(PieceKey(ATTEMPT, StepNumber(7), Phase.SUM, span.index)))]
    assert machine.taken(span) == ack
    assert machine.receive(1, total(span)) == ack


def test_a_share_that_cannot_be_used_may_come_again(machine: AllReduce) -> None:
    span = SHARDS[0][0]
    machine.receive(1, share(span, text="noise"))
    machine.receive(2, share(span))
    machine.share_refused(span, 1)
    assert machine.receive(2, share(span)) == [], "the other one's is still here"
    (effect,) = machine.receive(1, share(span, text="better"))
    assert isinstance(effect, SumShares)
    assert [s.payload for s in effect.shares.values()] == [b"0.0", b"better", b"share"]


def test_a_sum_that_cannot_be_used_may_come_again(machine: AllReduce) -> None:
    span = SHARDS[2][0]
    machine.receive(2, total(span, text="noise"))
    machine.sum_refused(span)
    assert machine.receive(2, total(span)) == [TakeSum(span, tensor(span, "sum"))]


def test_what_belongs_to_an_earlier_step_or_attempt_is_void(machine: AllReduce) -> None:
    span = SHARDS[0][0]
    for old in (share(span, step=6), share(span, attempt=2), share(span, attempt=2, step=9)):
        assert machine.receive(1, old) == []
    old_ack = PieceAck(PieceKey(ATTEMPT, StepNumber(6), Phase.SHARE, SHARDS[1][0].index))
    assert machine.receive(1, old_ack) == []
    assert machine.receive(1, share(span)) == machine.receive(1, share(SHARDS[0][1])) == []
    assert isinstance(machine.receive(2, share(span))[0], SumShares)


def test_shares_that_come_before_their_step_are_taken_up_when_it_begins(machine: AllReduce) -> None:
    spans = SHARDS[0]
    for span in spans:
        assert machine.receive(1, share(span, step=8)) == []
    assert machine.receive(1, share(spans[0], step=8)) == [], "twice"
    made = sum_ready(machine, machine.begin(StepNumber(8), DIVISION))
    made += machine.receive(2, share(spans[0], step=8))
    assert [e.span for e in made if isinstance(e, SumShares)] == [spans[0]]


def test_early_shares_of_a_broken_stream_are_forgotten_since_they_come_again(
    machine: AllReduce,
) -> None:
    span = SHARDS[0][0]
    machine.receive(1, share(span, step=8, text="noise"))
    machine.disconnected(1)
    machine.connected(1)
    sum_ready(machine, machine.begin(StepNumber(8), DIVISION))
    machine.receive(2, share(span, step=8))
    (effect,) = machine.receive(1, share(span, step=8, text="again"))
    assert isinstance(effect, SumShares)
    assert effect.shares[1].payload == b"again"


def test_early_shares_outside_the_division_cost_the_stream_and_not_the_step(
    machine: AllReduce,
) -> None:
    foreign = SHARDS[1][0]
    machine.receive(1, share(foreign, step=8))
    machine.receive(2, share(SHARDS[0][0], step=8))
    effects = machine.begin(StepNumber(8), DIVISION)
    (broken,) = (e for e in effects if isinstance(e, BreakOff))
    assert broken.member == 1
    assert isinstance(broken.error, OutOfTurn)
    sum_ready(machine, effects)
    assert isinstance(machine.receive(1, share(SHARDS[0][0], step=8))[0], SumShares)


def test_early_sums_are_taken_up_by_who_listens_and_cost_anybody_else_the_stream(
    machine: AllReduce,
) -> None:
    alone = Division(6 * PIECE + 5, 3, {0, 1})
    assert machine.receive(2, total(alone.spans[0], step=8)) == []
    assert machine.begin(StepNumber(8), alone) == [
        TakeSum(alone.spans[0], total(alone.spans[0]).tensor)
    ]
    assert machine.receive(2, total(SHARDS[2][0], step=9)) == []
    (broken,) = (e for e in machine.begin(StepNumber(9), DIVISION) if isinstance(e, BreakOff))
    assert broken.member == 2
    assert "before this member sent its share" in broken.error.message


@pytest.mark.parametrize("early", ["share", "total"])
def test_no_more_pieces_are_held_early_than_a_window(machine: AllReduce, early: str) -> None:
    for index in range(WINDOW_PIECES):
        piece = {"share": share, "total": total}[early](DIVISION.spans[0], step=8)
        key = piece.key._replace(piece=index)
        assert machine.receive(1, GradientPiece(key, piece.tensor)) == []
    with pytest.raises(OutOfTurn, match="before their step began"):
        machine.receive(1, GradientPiece(piece.key._replace(piece=99), piece.tensor))


def test_no_more_shares_and_sums_are_held_than_a_window() -> None:
    division = Division(2 * (WINDOW_PIECES + 1) * PIECE, 2)
    own, theirs = (division.spans[: WINDOW_PIECES + 1], division.spans[WINDOW_PIECES + 1 :])
    machine = AllReduce(attempt=ATTEMPT, num_members=2, own=0)
    machine.connected(1)
    machine.begin(StepNumber(7), division)
    for span in own[:-1]:
        assert machine.receive(1, share(span)) == []
    with pytest.raises(OutOfTurn, match="more than 32 shares"):
        machine.receive(1, share(own[-1]))
    for span in theirs:
        machine.encoded(span, tensor(span, "own"))
    for span in theirs[:-1]:
        assert isinstance(machine.receive(1, total(span))[0], TakeSum)
    with pytest.raises(OutOfTurn, match="more than 32 sums"):
        machine.receive(1, total(theirs[-1]))


def test_shares_are_encoded_no_further_than_a_window_and_for_all_members_in_turn() -> None:
    division = Division(3 * 100 * PIECE, 3)
    machine = AllReduce(attempt=ATTEMPT, num_members=3, own=1)
    owners = []
    for effect in machine.begin(StepNumber(0), division):
        assert isinstance(effect, EncodeShare)
        owners.append(effect.span.owner)
    assert owners == [2, 0, 1] * WINDOW_PIECES
    first = next(span for span in division.spans if span.owner == 2)
    machine.encoded(first, tensor(first, "own"))
    key = PieceKey(ATTEMPT, StepNumber(0), Phase.SHARE, first.index)
    (more,) = machine.receive(2, PieceAck(key))
    assert more == EncodeShare(division.spans[first.index + WINDOW_PIECES])


SHORT = EncodedTensor(CODEC, 1, ROW_VALUES, b"")
ATTACKS: dict[str, tuple[GradientPiece, type[ProtocolError], str]] = {
    "a share for another member": (share(SHARDS[2][0]), OutOfTurn, "SHARE of piece .: expected 0"),
    "a share beyond the last piece": (
        GradientPiece(PieceKey(ATTEMPT, StepNumber(7), Phase.SHARE, 1 << 31), SHORT),
        OutOfTurn,
        "SHARE of piece 2147483648",
    ),
    "a sum of another's shard": (total(SHARDS[2][0]), OutOfTurn, "SUM of piece"),
    "a sum of this member's shard": (total(SHARDS[0][0]), OutOfTurn, "SUM of piece 0"),
    "a share of another shape": (
        GradientPiece(share(SHARDS[0][0]).key, SHORT),
        BadFrame,
        "expected 2048 x 128 values, got 1 x 128",
    ),
    "a sum of another shape": (GradientPiece(total(SHARDS[1][0]).key, SHORT), BadFrame, "1 x 128"),
}


@pytest.mark.parametrize(("message", "error", "match"), ATTACKS.values(), ids=ATTACKS)
def test_what_no_honest_member_says_is_refused_and_changes_nothing(
    machine: AllReduce, message: GradientPiece, error: type[ProtocolError], match: str
) -> None:
    with pytest.raises(error, match=match):
        machine.receive(1, message)
    span = SHARDS[0][0]
    machine.receive(1, share(span))
    assert isinstance(machine.receive(2, share(span))[0], SumShares)


def test_a_sum_before_its_share_was_sent_is_refused() -> None:
    machine = AllReduce(attempt=ATTEMPT, num_members=3, own=0)
    machine.begin(StepNumber(7), DIVISION)
    with pytest.raises(OutOfTurn, match="before this member sent its share"):
        machine.receive(1, total(SHARDS[1][0]))


def test_acknowledgements_of_what_was_never_sent_change_nothing(machine: AllReduce) -> None:
    for phase in Phase:
        assert machine.receive(1, PieceAck(PieceKey(ATTEMPT, StepNumber(7), phase, 1 << 31))) == []
    assert not machine.is_settled


def test_a_member_without_a_shard_still_gets_the_sums() -> None:
    division = Division(7, 3)
    machine = AllReduce(attempt=ATTEMPT, num_members=3, own=0)
    (span,) = division.spans
    assert machine.begin(StepNumber(0), division) == [EncodeShare(span)]
    machine.encoded(span, tensor(span, "own"))
    machine.receive(2, total(span, step=0))
    machine.taken(span)
    assert not machine.is_settled, "its share is not acknowledged"
    machine.receive(2, PieceAck(PieceKey(ATTEMPT, StepNumber(0), Phase.SHARE, 0)))
    assert machine.is_settled


def test_a_step_begins_once_in_an_attempt(machine: AllReduce) -> None:
    for step in (6, 7):
        with pytest.raises(OutOfTurn, match="7 has begun"):
            machine.begin(StepNumber(step), DIVISION)


def test_a_new_step_drops_what_the_last_one_left(machine: AllReduce) -> None:
    span = SHARDS[0][0]
    machine.receive(1, share(span))
    made = sum_ready(machine, machine.begin(StepNumber(8), DIVISION))
    assert all(e.message.key.step == 8 for e in made if isinstance(e, TransmitPiece))
    assert machine.receive(2, share(span, step=8)) == []
