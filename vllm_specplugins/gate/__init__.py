"""How many tokens to draft: by what was accepted so far (`ledger.py`) and what a step costs (`costs.py`).

`gate.py` weighs the two for each request. `step_times.py` chooses one number for all requests, where drafts stay on the
device. Loops are compiled; what each of them does is written as operations on arrays for tensors (`on_device.py` of the
cascade, kernels/acceptance), and the results are the same. R: requests of a step, K: most tokens of a draft.
"""
