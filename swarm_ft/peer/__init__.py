"""A volunteer's machine: hosts one stage of a run and talks to its neighbours."""
