"""Messages between processes, as frozen values."""
