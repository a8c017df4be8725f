"""What went into the coordinator's decisions, written down as it comes, to be decided again."""
