"""Public helpers for tests: fakes that are verified, clocks that stand still."""
