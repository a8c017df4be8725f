"""What is said: messages, sessions, RunSpec. No I/O, no torch, no clock."""
