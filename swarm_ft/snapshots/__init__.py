"""A run's state at a committed step: written, listed, read. Knows files; no engine, no network.

`shard` is one stage's file, `store` where the shards of all stages lie and what makes them a
snapshot, `files` whatever keeps files. Only `shard` needs torch.
"""
