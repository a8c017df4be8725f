"""Files of their owner alone, created under any umask or found with wider rights."""

from pathlib import Path

import pytest

from swarm_ft.base.private_files import atomic_write, make_private, open_private, private_folder

pytestmark = pytest.mark.usefixtures("no_umask")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("mode", ["wb", "ab", "xb", "a+b"])
def test_a_new_file_is_its_owners(tmp_path: Path, mode: str) -> None:
    with open_private(tmp_path / "file", mode) as file:
        file.write(b"private")
    assert mode_of(tmp_path / "file") == 0o600


def test_a_file_that_is_there_becomes_its_owners(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with open_private(tmp_path / "file", "ab") as file:
        file.write(b" and new")
    assert mode_of(tmp_path / "file") == 0o600
    assert (tmp_path / "file").read_bytes() == b"old and new"


def test_a_folder_is_its_owners_and_those_above_it_are_as_they_are_made(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "above" / "folder")
    assert (mode_of(folder.parent), mode_of(folder)) == (0o777, 0o700)
    folder.chmod(0o755)
    assert mode_of(private_folder(folder)) == 0o700


def test_rights_are_taken_and_none_are_given(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o466)
    make_private(tmp_path / "file")
    assert mode_of(tmp_path / "file") == 0o400


def test_a_folder_like_tmp_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    private_folder(tmp_path)
    assert mode_of(tmp_path) == 0o1777


def test_what_replaces_a_file_is_there_whole_and_its_owners(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with atomic_write(tmp_path / "file") as partial:
        partial.write_bytes(b"new")
        assert (tmp_path / "file").read_bytes() == b"old"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert mode_of(tmp_path / "file") == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_cannot_replace_a_file_leaves_it_as_it_was_and_nothing_beside_it(
    tmp_path: Path,
) -> None:
    def write_half(partial: Path) -> None:
        partial.write_bytes(b"half")
        raise OSError("full")

    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match="full"), atomic_write(tmp_path / "file") as partial:
        write_half(partial)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
