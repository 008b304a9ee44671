"""Several proposers of one configuration, combined: `cascade.py` is the proposer, a policy says who drafts what.

A drafter (`drafters.py`) continues the drafts that others began: a lookup, a model proposer (`staged.py`), a method
built into vLLM (`built_in.py`), a stage of the user's own (`isolated.py`). The policies `auto` and `verify` are
drafters that hold others. `on_device.py` is the same for tensors, where drafts never visit the host. The gate (`gate/`)
decides how many tokens are drafted. `*_numba.py`: the compiled loops of the module of that name.
"""
