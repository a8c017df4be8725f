"""Who is there. It knows names and endpoints; it refuses to know what anyone does there."""

from swarm_ft.discovery.base import Directory, Role
from swarm_ft.discovery.initial_peers import expand_initial_peers

__all__ = ["Directory", "Role", "expand_initial_peers"]
