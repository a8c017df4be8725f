"""The entropy stage: codes in nearly as few bytes as they need, and what frames say of them."""
