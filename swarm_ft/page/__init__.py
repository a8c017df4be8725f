"""The coordinator's page, its metrics, and whether it is healthy: all that is said over HTTP."""
