"""Parts that get better while they serve: what the target verifies is their training data.

Liu et al. 2023, "Online Speculative Decoding". The engine's thread keeps what was read (`windows.py`, `examples.py`)
and copies new weights into the serving part before a step (`learner.py`); a thread of the learner's own trains a copy
(`trainer.py`) in a share of the time (`pace.py`), and promotes it only if it is better on held-out windows
(`promotion.py`). Drafts alone depend on any of it: outputs do not.
"""
