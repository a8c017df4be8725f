"""State machines of the protocol, without I/O, clock or randomness."""
