"""Messages to and from protobuf, checked: the one place where others' bytes become values."""
