"""Byte streams between members, through routers: front, ladder, relay, tunnels."""
