"""Adapts Model Runner V1, with one file for each task."""
