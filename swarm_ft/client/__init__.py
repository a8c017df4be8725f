"""Who wants a model trained: submits the job, watches it, fetches the result."""
