"""State, events and effects of the coordinator. Values only."""
