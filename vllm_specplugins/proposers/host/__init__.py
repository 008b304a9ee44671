"""What drafters and the gate do with arrays, as compiled loops for the host.

There many small operations on arrays take longer than their work. What each function does is written as operations on
arrays where it is called, for tensors; the results are the same. R: requests of a step, K: most tokens of a draft.
"""
