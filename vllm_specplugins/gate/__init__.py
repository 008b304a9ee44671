"""Chooses the number of tokens to draft from acceptance probabilities (kernels/acceptance) and step times: for each
request on the host (`gate.py`), or one number for all requests if drafts stay on the device (`step_times.py`)."""
