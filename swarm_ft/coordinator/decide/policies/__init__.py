"""Policies that decide what a run does between two steps; `order` lists them."""
