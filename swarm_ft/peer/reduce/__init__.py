"""Sums of gradients over the replicas of a stage, and over stages with shared weights."""
