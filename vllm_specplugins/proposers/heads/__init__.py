"""Trained parts of model proposers: their files, the check against a target, and their application."""
