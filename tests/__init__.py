"""Tests, the simulator and the fault matrix."""
