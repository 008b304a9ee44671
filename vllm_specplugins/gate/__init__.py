"""How many tokens to draft, by acceptance probabilities (kernels/acceptance) and by the times of steps.

`gate.py` chooses for each request on the host; draft_tracker.py and costs.py are its two records. `step_times.py`
chooses one number for all requests, where drafts stay on the device.
"""
