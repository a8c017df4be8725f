"""Write the checkout's commit into what is built of it; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # a build runs in an environment of its own
from swarm_ft.build import COMMIT_FILE, commit_of_checkout  # noqa: E402


class BuildWithCommit(build_py):
    """As `build_py`, with `swarm_ft/commit.txt` where the source is a checkout."""

    def run(self) -> None:
        """Build the packages, then write the commit beside them."""
        super().run()
        commit = commit_of_checkout(HERE)
        if commit and not self.editable_mode:
            (Path(self.build_lib) / "swarm_ft" / COMMIT_FILE).write_text(f"{commit}\n")


setup(cmdclass={"build_py": BuildWithCommit})
