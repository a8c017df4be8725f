"""Recordings of all inputs of the coordinator's decisions, for replay."""
