"""Specification of a run: options, codecs' names, order of samples. Values and rules."""
