"""Sizes of the tensors that codecs encode."""

from __future__ import annotations

MAX_TOKENS = 1 << 17
"""Tokens of a sample."""
MAX_CHANNELS = 1 << 16
"""Channels of a token."""
ROW_VALUES = 128
"""Values of a gradient that share a step of quantisation.

Usual widths are multiples of it, so rows seldom hold values of two tokens' embeddings or of two
neurons.
"""
PIECE_ROWS = 2048
"""Rows of a piece of a gradient at most: a megabyte of float32.

So coding, sending and summing overlap, and a piece does not delay a frame on another stream.
"""
