"""Adapts Model Runner V2, with one file for each task."""
