"""Files too large to say in a message: given in chunks, fetched from all who have them at once.

`source` gives, `download` fetches; `protocol.shard` says what a shard is and how it is checked.
"""
