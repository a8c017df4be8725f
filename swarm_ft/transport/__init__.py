"""How messages move. It knows streams of messages; it refuses to know what they mean."""
