"""Model Runner V2: contains the speculators. `host.py` runs proposers on the host, and `device.py` drafts in one CUDA
graph. Both extend `base.py`, which can run the target's layers on vLLM's paged KV cache (`paged.py`)."""
