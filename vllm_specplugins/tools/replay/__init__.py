"""Implements `replay`, which runs recorded traffic through proposers that read token ids, without a model."""
