"""Sealed values open with their key, in their place, unaltered; and in no other way."""

import stat
from pathlib import Path

import pytest

from swarm_ft.base.sealing import KEY_BYTES, SEAL_BYTES, Sealer, sealing_key_at
from swarm_ft.errors import BadOption

KEY = bytes(range(KEY_BYTES))


@pytest.mark.parametrize("data", [b"", b"x", bytes(100_000)])
def test_what_is_sealed_opens_again(data: bytes) -> None:
    sealed = Sealer(KEY, "test").seal(data, b"here")
    assert len(sealed) == len(data) + SEAL_BYTES
    assert Sealer(KEY, "test").open(sealed, b"here") == data


def test_equal_bytes_are_sealed_differently_each_time() -> None:
    sealer = Sealer(KEY, "test")
    assert sealer.seal(b"again", b"") != sealer.seal(b"again", b"")


@pytest.mark.parametrize(
    ("key", "use", "place"),
    [(bytes(KEY_BYTES), "test", b"here"), (KEY, "other", b"here"), (KEY, "test", b"there")],
)
def test_another_key_use_or_place_opens_nothing(key: bytes, use: str, place: bytes) -> None:
    sealed = Sealer(KEY, "test").seal(b"secret", b"here")
    with pytest.raises(ValueError, match="not sealed here with this key"):
        Sealer(key, use).open(sealed, place)


@pytest.mark.parametrize("length", range(0, SEAL_BYTES + 6, 3))
def test_what_was_cut_off_or_altered_does_not_open(length: int) -> None:
    sealer = Sealer(KEY, "test")
    sealed = sealer.seal(b"secret", b"here")
    altered = bytearray(sealed)
    altered[length] ^= 1
    for spoiled in (sealed[:length], bytes(altered)):
        with pytest.raises(ValueError, match="not sealed here"):
            sealer.open(spoiled, b"here")


def test_a_key_has_its_length() -> None:
    with pytest.raises(ValueError, match="expected 32 bytes, got 3"):
        Sealer(b"abc", "test")


def test_a_keys_file_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "stick" / "key"
    key = sealing_key_at(path)
    assert len(key) == KEY_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sealing_key_at(path) == key


def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"too short")
    with pytest.raises(BadOption, match="expected a file of 32 bytes"):
        sealing_key_at(tmp_path / "key")
    with pytest.raises(BadOption, match="directory"):
        sealing_key_at(tmp_path)
