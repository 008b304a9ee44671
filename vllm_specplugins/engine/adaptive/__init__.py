"""Runs adaptive verification on the device: `trimming.py` enables vLLM's implementation, and `budget.py` chooses the
number of draft tokens."""
