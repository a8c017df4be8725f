"""The coordinator: membership, plans, commits, the journal. No tensors of models, no torch."""
