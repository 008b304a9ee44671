"""Parts that get better while they serve: what the target verifies is their training data.

Liu et al. 2023, "Online Speculative Decoding". A thread of the learner's own (`learner.py`) takes what the engine read
(`windows.py`), trains a copy of the part (`trainer.py`) in a share of the time (`pace.py`), and promotes it only if it
is better on held-out windows (`promotion.py`). The engine's thread copies what was promoted into the serving part,
between two steps. Drafts alone depend on any of it: outputs do not.
"""
