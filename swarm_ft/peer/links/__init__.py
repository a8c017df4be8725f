"""A stream kept to another peer: found, dialled, replaced."""
