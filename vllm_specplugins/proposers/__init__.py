"""Contains the proposers: classes that follow `vllm_specplugins.draft.Proposer` and do not import vLLM.

To add one, read draft.py (and target.py, if it runs the target), config/proposers.py, methods.py and a class here.
"""
