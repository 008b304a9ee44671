"""Trains parts on what the target verifies while the engine serves (Liu et al. 2023, "Online Speculative Decoding").

The engine's adapters (`engine/v1/learning.py`, `engine/v2/learning.py`) make a `target.Reading` of each step. The
learner's thread (`learner.py`) enters readings in windows (`windows.py`), trains a copy of the part (`trainer.py`) in a
share of the time (`pace.py`) and promotes the copy if it is better on held-out windows (`promotion.py`). The engine's
thread copies promoted weights between two steps. Only drafts depend on the weights: outputs do not.
"""
