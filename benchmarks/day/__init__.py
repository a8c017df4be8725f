"""Ten minutes of a swarm by a script, and what of it is told; see `__main__`."""
