"""Decisions of the coordinator: `machine.decide`, and its parts. Pure."""
