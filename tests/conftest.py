"""What holds for all tests."""

import os

# As the commands set it. gRPC reads it when it is imported, which collecting the tests does; its
# notes would then appear among the lines of commands that a test runs in this process.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
