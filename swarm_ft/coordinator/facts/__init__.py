"""What the coordinator knows, what can happen to it, what it can do. Values only."""
