"""A swarm whose peers and client are behind home routers, by one word each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.homes import Home, Household, Internet, Nat, why_not
from swarm_ft.client.demo_input import DemoInput
from swarm_ft.protocol.spec.sample_rows import words_of
from tests.town import DELAYED, Town, Trouble

NUM_STEPS, LONG = 20, 200
PORT = 7000
NUM_TOKENS = 40 * 32
"""That a town trains on."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.homes,
    pytest.mark.timeout(480),
    pytest.mark.xdist_group("swarm"),
    pytest.mark.skipif(bool(why_not(Home(link=DELAYED))), reason=why_not(Home(link=DELAYED))),
]

Furnish = Callable[[Nat], Household]


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


@pytest.fixture
def furnish(internet: Internet) -> Furnish:
    """A household of this kind on the one internet."""
    return lambda nat: internet.household(Home(nat, link=DELAYED))


@pytest.fixture(scope="module")
def quiet(
    sample: DemoInput, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """The report of the same job on one machine, on which nothing happens."""
    reports: dict[int, dict[str, Any]] = {}

    def report(num_steps: int) -> dict[str, Any]:
        if num_steps not in reports:
            folder = tmp_path_factory.mktemp("quiet")
            reports[num_steps] = Town(folder).train(sample, num_steps)
        return reports[num_steps]

    return report


Quiet = Callable[[int], dict[str, Any]]


def words_of_samples(sample: DemoInput) -> list[bytes]:
    """Eight tokens from each tenth of the text, as they travel: less than a sample."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sample.model_dir)
    text = Path(sample.train_file).read_text(encoding="utf-8")
    few = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:NUM_TOKENS]
    return [words_of(few[i : i + 8]).tobytes() for i in range(0, len(few), len(few) // 10)]


def test_a_swarm_behind_routers_trains_as_one_on_one_machine(
    furnish: Furnish, quiet: Quiet, sample: DemoInput, tmp_path: Path
) -> None:
    public = furnish("open").machines[0]
    houses = [furnish(nat) for nat in ("cone", "symmetric", "cgnat")]
    one, two, three = (house.machines[0] for house in houses)
    with ExitStack() as stack:
        captures = [stack.enter_context(house.router.capture()) for house in houses]
        report = Town(tmp_path, public, (one, two), three).train(sample, NUM_STEPS)
    assert report["losses"] == quiet(NUM_STEPS)["losses"]
    assert [captured.num_missed for captured in captures] == [0, 0, 0]
    markers = (*words_of_samples(sample), b"/swarm_ft.v1.", sample.model_dir.encode())
    assert not [marker for marker in markers for captured in captures if captured.saw(marker)]
    kinds = report["bytes_by_kind"]
    relayed = sum(kinds[name]["sent"] for name in ("forward", "backward", "evaluation"))
    assert report["relayed_bytes"] == relayed > 0
    assert quiet(NUM_STEPS)["relayed_bytes"] == 0
    assert [house.router.num_accepted for house in houses] == [0, 0, 0]


def test_who_reaches_the_two_others_is_placed_between_them(
    furnish: Furnish, quiet: Quiet, sample: DemoInput, tmp_path: Path
) -> None:
    """Two of the three possible orders of the pipeline would relay half of the bytes."""
    public, client, *peers = (
        furnish(nat).machines[0] for nat in ("open", "cone", "symmetric", "symmetric", "open")
    )
    town = Town(tmp_path, public, tuple(peers), client, layers=("auto",) * len(peers))
    report = town.train(sample, NUM_STEPS)
    one_boundary = quiet(NUM_STEPS)["bytes_by_kind"]["forward"]["uncompressed"]
    assert report["bytes_by_kind"]["forward"]["uncompressed"] == 2 * one_boundary
    assert report["relayed_bytes"] == 0


def test_one_forwarded_port_is_all_that_a_coordinator_needs(
    internet: Internet, furnish: Furnish, quiet: Quiet, sample: DemoInput, tmp_path: Path
) -> None:
    """No node of its DHT is reached by anybody."""
    home = internet.household(Home("cone", link=DELAYED, forwarded=(PORT,)))
    one, two, three = (furnish(nat).machines[0] for nat in ("cone", "symmetric", "cone"))
    town = Town(tmp_path, home.machines[0], (one, two), three, (home.address, PORT))
    assert town.train(sample, NUM_STEPS)["losses"] == quiet(NUM_STEPS)["losses"]


def test_routers_that_forget_and_addresses_that_change_cost_no_step(
    furnish: Furnish, quiet: Quiet, sample: DemoInput, tmp_path: Path
) -> None:
    public = furnish("open").machines[0]
    houses = [furnish(nat) for nat in ("cone", "cone", "symmetric")]
    one, two, three = (house.machines[0] for house in houses)
    troubles = (
        Trouble(1, lambda _: houses[0].router.flush_connections()),
        Trouble(3, lambda _: houses[1].router.change_address()),
        Trouble(5, lambda _: houses[2].router.flush_connections()),
    )
    report = Town(tmp_path, public, (one, two), three).train(sample, LONG, troubles)
    assert report["losses"] == quiet(LONG)["losses"]
