"""Algorithms as they were before they were made fast: tests compare results with theirs."""
