"""Loads, checks and runs the trained parts of model proposers."""
