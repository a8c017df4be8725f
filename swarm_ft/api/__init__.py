"""The roles put together, for programs: what `swarm_ft` offers, and what the command line calls.

| module | what |
|---|---|
| `joining` | a process's way into a swarm, and its place there |
| `training` | a job from its options to its result |
| `serving`, `peer_home` | a machine that is lent |
| `coordinating`, `swarm_keys` | a coordinator, and the keys beside its journal |
| `local_swarm`, `processes` | a whole swarm here: in this process, or in processes of its own |
| `trainer` | the same by the names of the Trainer and TRL |
| `pipeline` | stages and codecs under a loop of one's own |
| `loop` | both forms of a call: that waits, and that is awaited |
"""

import os

# Read when gRPC is imported; its notes of handshakes would stand among a program's own words.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
