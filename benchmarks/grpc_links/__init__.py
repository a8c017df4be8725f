"""Large messages over slow and distant links: what gRPC's arguments and TCP's settings do to it."""
