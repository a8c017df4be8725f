"""Snapshots: a run's state at a committed step on disk, without an engine or a network.

`shard` writes and reads one stage's file. `store` keeps the shards of all stages and the manifest
that makes them a snapshot. `files` reads and writes files at an fsspec url. Only `shard` needs
torch.
"""
