"""Drafts with a model on another server."""
