"""Questions about a run and their answers: who hosts what, which way a microbatch goes. Pure."""
