"""How many tokens to draft, by acceptance probabilities (kernels/acceptance) and by the times of steps: for each
request on the host (`gate.py`), or one number for all where drafts stay on the device (`step_times.py`)."""
