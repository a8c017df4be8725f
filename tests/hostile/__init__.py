"""Real attacks on real swarms: who may call what, and what 48 attacks come to.

`python -m tests.hostile` runs them; benchmarks/reports/security.md says what is promised.
"""

import os

# gRPC reads it when it is imported, and would tell of every handshake that is refused.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
