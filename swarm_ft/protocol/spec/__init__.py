"""What a run is: its specification, its codecs' names, its samples' order. Values and rules."""
