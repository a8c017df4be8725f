"""What follows from an event: `machine.decide`, and the parts of it. Pure."""
