"""The Python API of `swarm_ft`, which the command line calls too.

| module | contents |
|---|---|
| `joining` | connections of a process to a swarm |
| `training` | a job from its options to its result |
| `serving`, `peer_home` | a peer, and its files |
| `coordinating`, `swarm_keys` | a coordinator, and the keys beside its journal |
| `local_swarm`, `processes` | a whole swarm on this machine, in this process or in own processes |
| `trainer` | the interface of transformers' Trainer and TRL |
| `pipeline` | stages and codecs for a training loop of the caller |
| `loop` | the blocking and the awaitable form of each call |
"""

import os

# gRPC reads this when it is imported. Its log of handshakes would mix with a program's output.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
