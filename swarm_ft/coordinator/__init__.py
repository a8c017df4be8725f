"""Who does what: membership, plans, commits, the journal. Never a model tensor, never torch."""
