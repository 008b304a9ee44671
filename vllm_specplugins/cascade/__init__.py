"""Several proposers of one configuration, combined.

`cascade.py` is the proposer that drafts on the host, `stage.py` one of its stages, `verify.py` the policy `verify`,
`built_in.py` a drafter of vLLM's as a stage. `on_device.py` drafts on the device. The gate (`gate/`) decides how many
tokens each stage drafts.
"""
