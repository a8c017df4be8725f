"""The share of volunteers' bytes that relays forward, in swarms that are drawn.

    python -m benchmarks.relayed_bytes [--swarms N] [--stages S] [--volunteers V ...] [--json]

Homes are drawn at published rates; introductions and decisions are the coordinator's own. Whoever
comes is introduced, tries to reach those that came before it, joins, and is placed when a job
comes. Then the bytes of one step are counted, link by link: with peers as they came (arbitrary),
placed by what their routers do (kinds), and by what came of their meetings, too (meetings).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, count, pairwise
from random import Random

from swarm_ft.coordinator.decide.machine import decide
from swarm_ft.coordinator.facts.connectivity import Connectivity, pair_of
from swarm_ft.coordinator.facts.events import Event, PeerJoined, RunSubmitted, Tick
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.meetings import MEETING_S, Meetings, OutgoingMessages
from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.coordinator.plan.routes import plan_microbatches
from swarm_ft.coordinator.relays import ConnectedRelay
from swarm_ft.coordinator.service import TICK_S
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.control import PeerHello
from swarm_ft.protocol.messages.meeting import (
    Linked,
    Meet,
    Reachable,
    RelayDistance,
    RelayDistances,
    RelayPlace,
    Way,
)
from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec

RELAY = RelayPlace(endpoint="192.0.2.1:7000", probe_endpoint="192.0.2.1:7001")
RUN = RunId("run-1")
PUNCHED = 0.7
"""Of pairs of which neither is open (arXiv 2510.27500: 70 % +- 7 % of 4.4 million attempts). Those
whose routers vary are counted in there; here they fail besides, which is on the safe side."""
GRADIENT_BITS, CROSSING_BITS = 4, 4 + 8
ARMS = ("arbitrary", "kinds", "meetings")


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The homes of each kind among a hundred; the others can be punched.

    Attributes:
        is_by_router: whether a punch fails for one of the two routers, with whomever, and not for
            the pair: as many fail then in all, and some reach nobody.
    """

    name: str
    open: int
    varying: int
    is_by_router: bool = False


MIXES = (
    # Halkes and Pouwelse 2011 ("UDP NAT and firewall puncturing in the wild"): 64 % can be punched.
    # How the others divide is assumed: evenly; all of them hard; and more behind carriers.
    Mix(name="64 % punchable, 18 % open, 18 % varying", open=18, varying=18),
    Mix(name="... failures by router", open=18, varying=18, is_by_router=True),
    Mix(name="64 % punchable, 6 % open, 30 % varying", open=6, varying=30),
    Mix(name="80 % punchable, none open, 20 % varying", open=0, varying=20),
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of all swarms of a mix; shares are of 1.

    Attributes:
        formed: swarms in which every stage had a peer.
        links: over which anything was sent: how many of them were relayed.
        bytes: how many of them were.
        ratio: of relayed bytes to those of the arbitrary order.
    """

    mix: str
    volunteers: int
    swarms: int
    formed: int
    links: dict[str, float]
    bytes: dict[str, float]
    ratio: dict[str, float]


class Swarm:
    """Volunteers' homes, drawn.

    Args:
        rng: draws.
        mix: kinds of homes.
        volunteers: how many.
    """

    def __init__(self, rng: Random, mix: Mix, volunteers: int) -> None:
        self.names = [PeerId(f"peer-{i:03}") for i in range(volunteers)]
        kinds = ("open", "varying", "cone")
        weights = (mix.open, mix.varying, 100 - mix.open - mix.varying)
        self.kinds = dict(zip(self.names, rng.choices(kinds, weights, k=volunteers), strict=True))
        good = {name: rng.random() < math.sqrt(PUNCHED) for name in self.names}
        self.is_punched = {
            (one, other): good[one] and good[other] if mix.is_by_router else rng.random() < PUNCHED
            for one, other in combinations(self.names, 2)
        }

    def way(self, one: PeerId, other: PeerId) -> Way:
        """Return how two members reach each other whenever they meet."""
        kinds = self.kinds[one], self.kinds[other]
        if "open" in kinds:
            return Way.DIRECT
        first, second = sorted((one, other))
        may_punch = "varying" not in kinds and self.is_punched[first, second]
        return Way.PUNCHED if may_punch else Way.RELAYED

    def introduced(self) -> Connectivity:
        """Return the connectivity that the coordinator knows once all members have joined."""
        numbers = count()
        meetings = Meetings(
            sign=lambda _: b"ticket",
            draw=lambda size: next(numbers).to_bytes(size, "big"),
            relays=lambda: (ConnectedRelay(place=RELAY),),
        )
        measured = RelayDistances(
            distances=(RelayDistance(endpoint=RELAY.endpoint, round_trip_s=0.04),)
        )
        for number, name in enumerate(self.names):
            host = f"198.51.{number // 250}.{number % 250 + 1}"
            endpoint = f"{host}:1" if self.kinds[name] == "open" else "192.168.1.2:1"
            reachable = Reachable(endpoints=(endpoint,))
            meetings.add_member(name, host, reachable, is_peer=True)
            if self.kinds[name] == "varying":
                meetings.on_message(name, replace(reachable, mapping_varies=True), 0.0)
            meetings.forget((number + 1) * MEETING_S)  # they do not come all at once
            self._meet(meetings, meetings.on_message(name, measured, (number + 1) * MEETING_S))
        return meetings.known()

    def _meet(self, meetings: Meetings, messages: OutgoingMessages) -> None:
        for name, message in messages:
            if isinstance(message, Meet) and message.is_caller:
                way = self.way(PeerId(name), PeerId(message.name))
                linked = Linked(meeting=message.meeting, way=way, took_s=0.1)
                meetings.on_message(name, linked, 0.0)


def placed(names: Sequence[PeerId], spec: RunSpec, ways: Connectivity) -> Run:
    """Return the run as the coordinator starts it for volunteers that joined in this order."""
    state, now_s = SwarmState(), 0.0
    hellos = [
        PeerHello(peer_id=name, endpoint="198.51.100.1:1", layers=None, memory_bytes=1 << 60)
        for name in names
    ]
    events: list[Event] = [*map(PeerJoined, hellos), RunSubmitted(RUN, spec)]
    for event in events:
        state, _ = decide(state, event, now_s)
    while now_s < SETTLE_S:
        now_s += TICK_S
        state, _ = decide(state, Tick(ways), now_s)
    return state.runs[RUN]


def sent_bytes(run: Run, ways: Connectivity) -> Counter[tuple[str, str]]:
    """Count the bytes that each pair exchanges in the first step, both ways."""
    train, model = run.spec.train, run.spec.model
    sent: Counter[tuple[str, str]] = Counter()
    for batch in plan_microbatches(train, StepNumber(0), run.stages, {}, None, ways):
        values = len(batch.samples) * train.seq_length * model.hidden_size
        hosts = [stage.peers[batch.replica_at(i)] for i, stage in enumerate(run.stages)]
        for one, other in pairwise(hosts):
            sent[pair_of(one, other)] += values * CROSSING_BITS // 8
    for stage in run.stages:
        shard = len(stage.layers) * model.block_bytes // 4 // len(stage.peers)
        for one, other in combinations(stage.peers, 2):
            sent[pair_of(one, other)] += 4 * shard * GRADIENT_BITS // 8
    return sent


def measure(mix: Mix, spec: RunSpec, volunteers: int, swarms: int) -> Figures:
    """Draw so many swarms, place each in every way, and add up."""
    formed = 0
    relayed, total = Counter[str](), Counter[str]()
    relayed_links, links = Counter[str](), Counter[str]()
    for seed in range(swarms):
        swarm = Swarm(Random(f"{mix.name}/{volunteers}/{seed}"), mix, volunteers)
        known = swarm.introduced()
        arms = zip(ARMS, (Connectivity(), replace(known, met={}), known), strict=True)
        is_formed = True
        for arm, ways in arms:
            run = placed(swarm.names, spec, ways)
            is_formed &= len(run.stages) == min(volunteers, spec.model.num_blocks)
            for (one, other), size in sent_bytes(run, ways).items():
                is_relayed = swarm.way(PeerId(one), PeerId(other)) is Way.RELAYED
                links[arm] += 1
                total[arm] += size
                relayed_links[arm] += is_relayed
                relayed[arm] += size * is_relayed
        formed += is_formed
    return Figures(
        mix=mix.name,
        volunteers=volunteers,
        swarms=swarms,
        formed=formed,
        links={arm: relayed_links[arm] / links[arm] for arm in ARMS},
        bytes={arm: relayed[arm] / total[arm] for arm in ARMS},
        ratio={arm: relayed[arm] / relayed["arbitrary"] for arm in ARMS},
    )


def spec_of(stages: int) -> RunSpec:
    """Describe one block a stage, in all of GPT-2 XL's size; surplus peers become replicas."""
    model = ModelSpec(
        reference="any",
        architecture="gpt2",
        num_blocks=stages,
        hidden_size=1600,
        vocab_size=50257,
        block_bytes=48 * 4 * 30_740_800 // stages,
        embed_digest=bytes(16),
        block_digests=(bytes(16),) * stages,
        head_digest=bytes(16),
        nonce=bytes(16),
        tied_embeddings=False,
    )
    train = TrainSpec(
        num_samples=1024,
        seq_length=1024,
        batch_size=32,
        micro_batch_size=1,
        num_steps=32,
        learning_rate=1e-4,
        lr_schedule=LrSchedule.CONSTANT,
        seed=0,
        forward_codec="aq4",
        backward_codec="q8",
        key_codec="fp16",
        dp_codec="q4",
    )
    return RunSpec(model=model, train=train)


def lines(figures: Sequence[Figures]) -> Iterator[str]:
    """Format the figures as a table for people."""
    arms = "".join(f"{arm:>15}" for arm in ARMS)
    yield f"{'relayed, of bytes (of links)':<44}{'peers':>6}{'formed':>11}{arms}{'ratio':>7}"
    for one in figures:
        cells = "".join(f"{one.bytes[arm]:>8.1%} ({one.links[arm]:4.0%})" for arm in ARMS)
        formed = f"{one.formed}/{one.swarms}"
        yield f"{one.mix:<44}{one.volunteers:>6}{formed:>11}{cells}{one.ratio['meetings']:>7.2f}"


def main() -> None:
    """Print a table, or all as JSON."""
    parser = argparse.ArgumentParser(description="How many bytes go over relays.")
    parser.add_argument("--swarms", type=int, default=1000)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--volunteers", type=int, nargs="+", default=[8, 12, 16])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    spec = spec_of(args.stages)
    figures = [measure(mix, spec, v, args.swarms) for mix in MIXES for v in args.volunteers]
    if args.json:
        sys.stdout.write(json.dumps([asdict(one) for one in figures], indent=2) + "\n")
        return
    for line in lines(figures):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
