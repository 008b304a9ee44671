"""Trained parts of model proposers: their files, whether they fit a target, and how they are applied."""
