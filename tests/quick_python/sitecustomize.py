"""Python imports this first where PYTHONPATH has this folder: processes of tests collect garbage less often. Each
collection looks at all that is imported, a fifth of the time of a start of vLLM."""

import gc

gc.set_threshold(100_000, 20, 100)
