"""What drafts by itself: classes that follow `vllm_specplugins.draft.Proposer` and know nothing of vLLM.

`prompt_lookup.py` and `suffix_lookup.py` search text; `early_exit.py`, `jump.py` and `medusa.py` run a part of the
target and draw their tokens by `draft_sampler.py`. What was trained for them is read in `heads/`.

To add one read draft.py (and target.py, if it runs the target), config/proposers.py, methods.py and a class here.
"""
