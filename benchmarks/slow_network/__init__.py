"""Throughput of swarm-ft and of others over slow links, with the limit beside it."""
