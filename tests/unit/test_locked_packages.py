"""The locked files of an index: those of the version, for the supported systems."""

import pytest
from packaging.version import Version

from deploy.lock_packages import CONSTRAINTS, FILES, is_wanted, pinned


@pytest.mark.parametrize(
    "filename",
    [
        "Some_Name-1.2.0.tar.gz",
        "some_name-1.2.0-py3-none-any.whl",
        "some_name-1.2.0-py2.py3-none-any.whl",
        "some_name-1.2.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "some_name-1.2.0-cp310-abi3-macosx_11_0_arm64.whl",
        "some_name-1.2.0-1-cp313-cp313-win_amd64.whl",
    ],
)
def test_files_of_the_version_for_our_systems_are_locked(filename: str) -> None:
    assert is_wanted(filename, Version("1.2.0"))


@pytest.mark.parametrize(
    "filename",
    [
        "some_name-1.2.0.post1.tar.gz",
        "some_name-1.2.0.zip",
        "some_name-1.2.1-py3-none-any.whl",
        "some_name-1.2.0-cp39-cp39-manylinux2014_x86_64.whl",
        "some_name-1.2.0-cp313-cp313t-manylinux2014_x86_64.whl",
        "some_name-1.2.0-cp312-cp312-musllinux_1_2_x86_64.whl",
        "some_name-1.2.0-cp312-cp312-manylinux2014_s390x.whl",
        "some_name-1.2.0-cp312-cp312-win32.whl",
        "not a file of a package",
    ],
)
def test_all_others_are_not(filename: str) -> None:
    assert not is_wanted(filename, Version("1.2.0"))


def test_each_part_of_the_constraints_has_its_file() -> None:
    for path, pins in zip(FILES, pinned(CONSTRAINTS.read_text()), strict=True):
        lines = path.read_text().splitlines()
        locked = [line.partition(" ")[0] for line in lines if "==" in line]
        assert locked == pins
        assert pins


def test_a_peer_installs_nothing_that_only_a_client_needs() -> None:
    package, client, *_ = pinned(CONSTRAINTS.read_text())
    names = {pin.partition("==")[0] for pin in client}
    assert {"datasets", "pandas", "pyarrow"} <= names
    assert not names & {pin.partition("==")[0] for pin in package}
