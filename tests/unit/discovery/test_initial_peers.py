from pathlib import Path

import pytest

from swarm_ft.discovery import expand_initial_peers
from swarm_ft.errors import BadOption


def test_addresses_stay_and_files_are_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    file.write_text("/b/1 /c/2\n\n\t/a/0\n")
    assert expand_initial_peers(["/a/0", f"@{file}", "/d/3"]) == ("/a/0", "/b/1", "/c/2", "/d/3")


def test_no_values_are_no_addresses() -> None:
    assert expand_initial_peers([]) == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
        (b"x" * ((1 << 20) + 1), "larger than"),
    ],
)
def test_a_file_without_addresses_is_a_bad_option(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "peers"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadOption, match=reason) as caught:
        expand_initial_peers([f"@{file}"])
    assert str(file) in caught.value.message


def test_a_directory_is_a_bad_option(tmp_path: Path) -> None:
    with pytest.raises(BadOption):
        expand_initial_peers([f"@{tmp_path}"])
