"""Byte streams to any member, whatever routers stand between: front, ladder, relay, tunnels."""
