"""The names of vLLM that we touch: what we replace and why (`replaced.toml`), and what a version must have."""
