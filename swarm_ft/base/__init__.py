"""Foundations of all floors above the codecs: clocks, logs, private files, operating systems."""
