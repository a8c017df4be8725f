"""The client: submits a job, watches its run and fetches the result."""
