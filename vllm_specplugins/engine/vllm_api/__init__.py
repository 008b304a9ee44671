"""vLLM's names that we use: the reasons for replacements (`replaced.toml`), and the check of a vLLM version."""
