"""The names by which browsers on other machines call the coordinator's page."""

import pytest

from swarm_ft.api import coordinator_process
from swarm_ft.api.coordinator_process import page_names
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import is_endpoint


@pytest.mark.parametrize(
    ("page", "listening", "names"),
    [
        ("192.0.2.7", ListenOptions(), ("192.0.2.7",)),
        ("0.0.0.0", ListenOptions(announce="a.example:7000"), ("a.example",)),
        ("::", ListenOptions(host="192.0.2.8"), ("192.0.2.8",)),
        ("10.0.0.1", ListenOptions("10.0.0.1", announce="a.example"), ("10.0.0.1", "a.example")),
        ("0.0.0.0", ListenOptions("0.0.0.0", announce="[2001:db8::1]"), ("2001:db8::1",)),
    ],
)
def test_they_are_those_that_were_named(
    page: str, listening: ListenOptions, names: tuple[str, ...]
) -> None:
    assert page_names(page, listening) == names


@pytest.mark.parametrize("page", ["0.0.0.0", "::"])
def test_else_it_is_the_address_that_leads_out(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    def own(to: str) -> str:
        requests.append(to)
        return "own"

    monkeypatch.setattr(coordinator_process, "own_address_towards", own)
    assert page_names(page, ListenOptions()) == ("own",)
    assert all(map(is_endpoint, requests))
    assert requests[0].startswith("[") == (page == "::")


def test_a_machine_without_a_way_out_has_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(to: str) -> str:
        raise BadOption(f"no way to {to}: unreachable")

    monkeypatch.setattr(coordinator_process, "own_address_towards", none)
    with pytest.raises(
        BadOption, match=r"--page 0\.0\.0\.0: expected --announce HOST with its name"
    ):
        page_names("0.0.0.0", ListenOptions())
