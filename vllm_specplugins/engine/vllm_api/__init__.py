"""Lists vLLM's names that the plugin uses, with the reasons for replacements (`replaced.toml`), and checks a vLLM
version."""
