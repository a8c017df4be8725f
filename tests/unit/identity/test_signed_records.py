"""Records that prove themselves."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.identity.keys import name_of, new_key
from swarm_ft.identity.records import MAX_CHARS, Signer, is_key_name, signed_endpoint
from swarm_ft.identity.roles import Role

KEY = new_key()
NAME = name_of(KEY.public_key())
TEXT = Signer(KEY).signed(Role.PEER, "203.0.113.7:7001", 1_800_000_000)
read = partial(signed_endpoint, Role.PEER, NAME)


def test_a_record_proves_itself() -> None:
    assert read(TEXT, 1_800_000_000) == "203.0.113.7:7001"
    assert is_key_name(NAME)
    assert len(TEXT) < 190


def test_it_is_taken_back_by_its_own_key() -> None:
    withdrawn = Signer(KEY).signed(Role.PEER, "", 1_800_000_000)
    assert read(withdrawn, 1_800_000_000) == ""


def test_it_is_of_one_role_one_name_and_one_time() -> None:
    other = Signer(new_key())
    assert signed_endpoint(Role.COORDINATOR, NAME, TEXT, 1_800_000_000) is None
    assert signed_endpoint(Role.PEER, other.name, TEXT, 1_800_000_000) is None
    assert read(TEXT, 1_800_000_001) is None
    forged = other.signed(Role.PEER, "203.0.113.7:7001", 1_800_000_000)
    assert read(forged, 1_800_000_000) is None


@given(st.integers(0, len(TEXT) - 1), st.characters(codec="ascii"))
def test_one_other_character_and_it_is_none(at: int, other: str) -> None:
    altered = TEXT[:at] + other + TEXT[at + 1 :]
    found = read(altered, 1_800_000_000)
    # The last bits of base64 may have no meaning; the read text equals the signed one.
    assert found in (None, "203.0.113.7:7001")
    if altered != TEXT and at < len("203.0.113.7:7001 1800000000 "):
        assert found is None


@given(st.text(max_size=300))
def test_any_other_text_is_none(text: str) -> None:
    assert read(text, 1_800_000_000) is None


@pytest.mark.parametrize(
    "name", ["peer-1a2b", "coordinator", "a" * 31, "A" * 32, "a" * 33, "1" * 32]
)
def test_other_names_are_not_keys(name: str) -> None:
    assert not is_key_name(name)


def test_a_record_fits_the_directory() -> None:
    longest = "x" * 60 + ".example.org:65535"
    assert len(Signer(KEY).signed(Role.PEER, longest, 1_800_000_000)) <= MAX_CHARS
