"""An authority's files."""

import stat
from datetime import timedelta
from pathlib import Path

import pytest

from swarm_ft.errors import BadOption, NotAllowed
from swarm_ft.identity.authority import (
    CERTIFICATE_FILE,
    COORDINATOR_FILE,
    KEY_FILE,
    PAGE_CERTIFICATE_FILE,
    PAGE_KEY_FILE,
    Authority,
    utc_now,
)
from swarm_ft.identity.certificates import WEB_LIFETIME_S, caller_of, from_pem, to_pem
from swarm_ft.identity.keys import key_pem
from swarm_ft.identity.roles import COORDINATOR_NAME, Role


def test_what_was_made_is_opened(tmp_path: Path) -> None:
    made = Authority.make(tmp_path / "keys")
    opened = Authority.open(tmp_path / "keys")
    assert opened.fingerprint == made.fingerprint
    assert opened.certificate == made.certificate


def test_its_files_are_its_owners_alone(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "keys")
    authority.coordinator()
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    for name in (KEY_FILE, CERTIFICATE_FILE, COORDINATOR_FILE):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600


def test_the_coordinator_keeps_its_key(tmp_path: Path) -> None:
    Authority.make(tmp_path / "keys")
    key, certificate = Authority.open(tmp_path / "keys").coordinator()
    again, _ = Authority.open(tmp_path / "keys").coordinator()
    assert key_pem(again) == key_pem(key)
    caller = caller_of(certificate, Authority.open(tmp_path / "keys").certificate)
    assert (caller.role, caller.name) == (Role.COORDINATOR, COORDINATOR_NAME)


def test_an_authority_is_never_replaced(tmp_path: Path) -> None:
    Authority.make(tmp_path / "keys")
    with pytest.raises(BadOption, match="already"):
        Authority.make(tmp_path / "keys")


def test_the_coordinators_key_is_rotated_alone(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "keys")
    before, _ = authority.coordinator()
    authority.rotate_coordinator()
    after, certificate = Authority.open(tmp_path / "keys").coordinator()
    assert key_pem(after) != key_pem(before)
    assert caller_of(certificate, authority.certificate).key == after.public_key()
    assert stat.S_IMODE((tmp_path / "keys" / COORDINATOR_FILE).stat().st_mode) == 0o600


def test_an_authority_is_replaced_if_that_is_meant(tmp_path: Path) -> None:
    old = Authority.make(tmp_path / "keys")
    shown = old.coordinator()[1]
    new = Authority.make(tmp_path / "keys", replaces=True)
    opened = Authority.open(tmp_path / "keys")
    assert opened.fingerprint == new.fingerprint != old.fingerprint
    with pytest.raises(NotAllowed):
        caller_of(shown, opened.certificate)
    assert opened.coordinator()[1].public_key() != shown.public_key()
    with pytest.raises(BadOption, match="no authority to replace"):
        Authority.make(tmp_path / "nowhere", replaces=True)


def test_what_is_missing_or_does_not_belong_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="swarm-ft init"):
        Authority.open(tmp_path / "keys")
    Authority.make(tmp_path / "keys")
    other = Authority.make(tmp_path / "other")
    (tmp_path / "keys" / CERTIFICATE_FILE).write_bytes(to_pem(other.certificate))
    with pytest.raises(BadOption, match="do not belong together"):
        Authority.open(tmp_path / "keys")
    (tmp_path / "keys" / CERTIFICATE_FILE).write_bytes(b"nothing")
    with pytest.raises(BadOption, match="expected a certificate"):
        Authority.open(tmp_path / "keys")


def test_the_pages_certificate_is_made_once(tmp_path: Path) -> None:
    made = Authority.make(tmp_path / "keys").web(["a.example", "10.0.0.1"])
    for name in (PAGE_KEY_FILE, PAGE_CERTIFICATE_FILE):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
    assert Authority.open(tmp_path / "keys").web(["10.0.0.1", "A.example"]).fingerprint == (
        made.fingerprint
    )


def test_the_pages_certificate_is_another_for_another_name_and_after_half_its_time(
    tmp_path: Path,
) -> None:
    authority = Authority.make(tmp_path / "keys")
    made, key = authority.web(["a.example"]), (tmp_path / "keys" / PAGE_KEY_FILE).read_bytes()
    other = authority.web(["b.example"])
    assert other.fingerprint != made.fingerprint
    later = Authority.open(
        tmp_path / "keys", lambda: utc_now() + timedelta(seconds=WEB_LIFETIME_S / 2 + 1)
    )
    assert later.web(["b.example"]).fingerprint != other.fingerprint
    assert (tmp_path / "keys" / PAGE_KEY_FILE).read_bytes() == key


def test_a_damaged_certificate_of_the_page_is_made_anew(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "keys")
    (tmp_path / "keys" / PAGE_CERTIFICATE_FILE).write_bytes(b"none")
    shown = authority.web(["a.example"])
    assert authority.web(["a.example"]) == shown


def test_the_pages_key_goes_with_the_coordinators(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "keys")
    made = authority.web(["a.example"])
    authority.rotate_coordinator()
    again = authority.web(["a.example"])
    assert again.fingerprint != made.fingerprint
    replaced = Authority.make(tmp_path / "keys", replaces=True)
    assert replaced.web(["a.example"]).fingerprint != again.fingerprint


def test_the_pages_certificate_makes_nobody_a_member(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "keys")
    shown = from_pem(authority.web(["a.example"]).certificate.read_bytes())
    with pytest.raises(NotAllowed, match="expected a role"):
        caller_of(shown, authority.certificate)
