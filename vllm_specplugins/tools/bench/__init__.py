"""Implements `bench`, which measures the speed-up of speculation on this machine, by method, kind of text and number of
requests."""
