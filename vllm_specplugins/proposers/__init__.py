"""The proposers: classes that follow `vllm_specplugins.draft.Proposer` and do not import vLLM.

`prompt_lookup.py` and `suffix_lookup.py` search text. `early_exit.py`, `jump.py` and `medusa.py` run a part of the
target by the loop in `draft_sampler.py`, with trained parts from `heads/`.

To add one read draft.py (and target.py, if it runs the target), config/proposers.py, methods.py and a class here.
"""
