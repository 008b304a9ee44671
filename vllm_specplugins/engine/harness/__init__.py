"""Runs real engines for the tools, which time and sample them from outside."""
