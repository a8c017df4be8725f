"""Identities of a swarm's members: keys, certificates, invitations. It opens no connection."""
