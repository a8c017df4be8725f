"""Protocol of a swarm: messages, sessions, RunSpec. No I/O, no torch, no clock."""
