"""Frames to and from a neighbour over one boundary."""
