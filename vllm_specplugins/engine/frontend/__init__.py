"""Code of the process that receives requests: the entry point (plugin.py), vLLM's configuration that carries ours
(spec_config.py), and the options of requests (options.py)."""
