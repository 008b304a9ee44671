"""Adaptive verification: vLLM trims drafts on the device. Where it can (`conditions.py`), and by what (`budget.py`)."""
