"""One part in a process of its own: `python -m benchmarks.gpu.child PART SECONDS SCENE`.

SCENE is its configuration apart from the time, as JSON.

Prints each row as a line of JSON as soon as it is known; whatever else is printed goes to standard
error. The last line reports the end, or the reason of a failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

import torch

from benchmarks.gpu.parts import BY_NAME, END, SPARE_S, SPARE_SHARE, Scene


def main() -> int:
    """Run the command."""
    name, settings = sys.argv[1], json.loads(sys.argv[3])
    seconds, rehearse = float(sys.argv[2]), settings["rehearse"]
    if not torch.cuda.is_available():
        # Read as Triton, which nothing has imported yet, declares its own functions.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    if not sys.stdin.isatty():
        threading.Thread(target=end_with_parent, daemon=True).start()
    out, sys.stdout = sys.stdout, sys.stderr
    scene = Scene(
        end_s=time.monotonic() + seconds,
        spare_s=0.0 if rehearse else min(SPARE_S, SPARE_SHARE * seconds),
        **settings,
    )

    def write_row(row: dict[str, Any]) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    try:
        for row in BY_NAME[name].rows(scene):
            write_row(dict(row))
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are to run
        traceback.print_exc()
        write_row({END: f"{type(error).__name__}: {error}"[:2000]})
        return 1
    write_row({END: ""})
    return 0


def end_with_parent() -> None:
    """End all that this part started once standard input ends: whoever runs it is gone."""
    while os.read(0, 1):  # not by `sys.stdin`: whose lock a thread that waits holds at the end
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
