"""Who is who in a swarm: keys, certificates, invitations. It opens no connection."""
