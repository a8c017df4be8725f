"""Who is there. It knows names and endpoints; it refuses to know what anyone does there."""

from swarm_ft.discovery.directory import Directory, expand_initial_peers

__all__ = ["Directory", "expand_initial_peers"]
