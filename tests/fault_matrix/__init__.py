"""The matrix of real faults: real processes that die, freeze and lose their links, on purpose.

`python -m tests.fault_matrix` runs it; docs/how-to/recover.md shows what came of it.
"""
