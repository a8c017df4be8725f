"""The process of a peer: it hosts stages of runs and exchanges tensors with neighbours."""
