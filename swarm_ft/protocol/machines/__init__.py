"""How a conversation goes on: state machines without I/O, clock or randomness."""
