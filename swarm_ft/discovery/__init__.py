"""Discovery of members: names and endpoints, without knowledge of their use."""

from swarm_ft.discovery.directory import Directory, expand_initial_peers

__all__ = ["Directory", "expand_initial_peers"]
