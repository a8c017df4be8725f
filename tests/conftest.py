"""What holds for all tests."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# As the commands set it. gRPC reads it when it is imported, which collecting the tests does; its
# notes would then appear among the lines of commands that a test runs in this process.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Peers keep their names and buffers in the user's cache; here, in one that is thrown away.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="swarm-ft-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Triton reads it as its own functions are declared, whoever imports it first. Without a GPU its
# kernels run in its interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
