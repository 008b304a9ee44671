"""Proposers: classes that follow `vllm_specplugins.draft.Proposer` and know nothing of vLLM."""
