"""A stage's state: held, given, taken, saved."""
