"""The names of vLLM that we touch: what we replace and why (`replaced.py`), and what a version must have."""
