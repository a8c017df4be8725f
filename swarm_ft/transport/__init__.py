"""Transport of messages as streams, without knowledge of their meaning."""
