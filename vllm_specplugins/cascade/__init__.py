"""Several proposers of one configuration, combined: `cascade.py` is the proposer with its policies.

`stage.py` is one of its stages, `staged.py` the policy `verify`, `built_in.py` a method built into vLLM as a stage.
`on_device.py` is the same for tensors, where drafts never visit the host. The gate (`gate/`) decides how many tokens
are drafted.
"""
