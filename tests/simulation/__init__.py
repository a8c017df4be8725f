"""Whole swarms in one thread on virtual time, with faults drawn from a seed.

Coordinator, peers and client are the real ones; the network, the disks, the clocks and the model's
arithmetic are simulated. One seed always gives one trace. `python -m tests.simulation`.
"""
