"""Trees of drafts on Model Runner V2: masks and positions before the target runs, the walk after it, the K/V moved.

A tree is grown along a draft (`proposers/tree.py`). Slots of the KV cache go by a node's index, positions by its depth;
what stands in the tables is what was fed, so any tree is exact.
"""
