"""The commands of `python -m vllm_specplugins`: measuring, playing, checking, and training parts that draft."""
