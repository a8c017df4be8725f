"""Keys in files, and the names that follow from them."""

import stat
from pathlib import Path

import pytest

from swarm_ft.errors import BadOption
from swarm_ft.identity.keys import fingerprint_of, key_at, key_pem, name_of, new_key


def test_a_key_stays_the_same_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "key.pem"
    key = key_at(path)
    assert key_pem(key_at(path)) == key_pem(key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_key_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(key_pem(new_key()))
    path.chmod(0o644)
    key_at(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_name_is_of_one_key() -> None:
    one, other = new_key().public_key(), new_key().public_key()
    assert name_of(one) == name_of(one) != name_of(other)
    assert fingerprint_of(one) != fingerprint_of(other)
    assert len(name_of(one)) == 32
    assert name_of(one).isalnum()
    assert name_of(one).islower()


@pytest.mark.parametrize("content", [b"", b"no key", b"\xff" * 5000])
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    with pytest.raises(BadOption, match="expected a P-256 private key"):
        key_at(path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadOption, match="key file"):
        key_at(tmp_path / "file" / "key.pem")
