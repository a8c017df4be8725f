"""Output in an encoding that lacks a letter loses the letter alone.

Sources: Textualize/rich#212, #826 and #68 (a summary that ends by UnicodeEncodeError).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252:strict", "utf-8"])
def test_a_command_prints_what_its_output_can_hold(tmp_path: Path, encoding: str) -> None:
    program = (
        "import sys, click\n"
        "from rich.console import Console\n"
        "from swarm_ft.cli import main\n"
        "@main.cli.command()\n"
        "def shown():\n"
        "    click.echo('out/ä/猫 1.00')\n"
        "    Console().print('result  out/ä/猫 2.00')\n"
        "    raise main.SwarmError('no ä/猫 here')\n"
        "main._COMMANDS['shown'] = 'swarm_ft.cli.status_line:shown'\n"
        "import swarm_ft.cli.status_line as home\n"
        "home.shown = shown\n"
        "sys.exit(main.run(['shown']))\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": encoding, "HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=False
    )
    text, codec = found.stdout + found.stderr, encoding.partition(":")[0]
    expected = "ä/猫".encode(codec, errors="replace")
    assert found.returncode == 1, text.decode(errors="replace")
    # click takes an ASCII output for one that is set up wrongly, and writes UTF-8.
    of_click = "ä/猫".encode() if codec == "ascii" else expected
    assert b"out/" + of_click + b" 1.00" in text
    assert b"result  out/" + expected + b" 2.00" in text
    assert b"swarm-ft: no " + of_click + b" here" in text
    assert b"Traceback" not in text
