"""HTTP at the coordinator: its web page, its metrics, and its health checks."""
