"""What holds for all tests."""

import os
from pathlib import Path

# As the commands set it. gRPC reads it when it is imported, which collecting the tests does; its
# notes would then appear among the lines of commands that a test runs in this process.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Triton reads it as its own functions are declared, whoever imports it first. Without a GPU its
# kernels run in its interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
