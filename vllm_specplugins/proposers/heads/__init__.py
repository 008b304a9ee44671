"""Trained parts of model proposers: what their files hold, whether they fit a target, and how they are applied."""
