"""Verifies draft trees on Model Runner V2: sets masks and positions before the target runs, and afterwards follows the
accepted path and moves its keys and values."""
