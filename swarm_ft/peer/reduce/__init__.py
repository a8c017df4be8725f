"""Replicas of a stage sum their gradients."""
