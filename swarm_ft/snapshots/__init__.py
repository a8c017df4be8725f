"""A run's state at a committed step: written, listed, read. Knows files; no engine, no network.

`shard` is one stage's file (torch), `store` where the shards of all stages lie, `manifest` what
makes them a snapshot. Only `shard` needs torch.
"""
