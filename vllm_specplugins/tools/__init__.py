"""Command-line tools that prepare a model for `early_exit`; `python -m vllm_specplugins` runs them."""
