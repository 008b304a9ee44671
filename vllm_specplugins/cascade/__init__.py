"""Several proposers of one configuration, combined: `cascade.py` is the proposer, and has the policies.

A stage (`drafters.py`) continues the drafts that others began: a lookup or a proposer of the user's own, a model
proposer (`staged.py`), a method built into vLLM (`built_in.py`). `on_device.py` is the same for tensors, where drafts
never visit the host. The gate (`gate/`) decides how many tokens are drafted.
"""
