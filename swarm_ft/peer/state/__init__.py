"""State of a stage: in memory, in transfers to other peers, and in snapshots."""
