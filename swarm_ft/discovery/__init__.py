"""Who is there. It knows names and endpoints; it refuses to know what anyone does there."""

from swarm_ft.discovery.directory import Directory, Role, expand_initial_peers

__all__ = ["Directory", "Role", "expand_initial_peers"]
