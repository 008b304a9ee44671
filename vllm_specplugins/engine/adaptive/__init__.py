"""Adaptive verification on the device: `trimming.py` enables vLLM's, and `budget.py` chooses the number of draft
tokens."""
