"""A scripted ten minutes of a swarm, and the reports about it; see `__main__`."""
