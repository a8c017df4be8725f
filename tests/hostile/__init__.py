"""Real attacks on real swarms: who may call what, and what 48 attacks come to.

`python -m tests.hostile` runs them; benchmarks/reports/security.md lists the promises.
"""

import os

# gRPC reads it when it is imported, and would log every handshake that is refused.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
