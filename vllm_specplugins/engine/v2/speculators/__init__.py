"""Model Runner V2: what drafts. `host.py` hands tokens to a proposer on the host, `device.py` drafts in one CUDA graph.

`base.py` is what both are to vLLM's runner, with the target's layers on its paged KV cache (`paged.py`).
"""
