"""The matrix of real faults: real processes that die, freeze and lose their links, on purpose.

`python -m swarm_ft.testing.fault_matrix` runs it; docs/reliability.md shows what came of it.
"""
