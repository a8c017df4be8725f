"""Doubles of real parts in tests; each passes the suite of its real part."""
