"""What is said, as frozen values."""
