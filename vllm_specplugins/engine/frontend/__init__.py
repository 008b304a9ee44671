"""The code for the process that receives requests: the entry point (plugin.py), vLLM's configuration with ours in it
(spec_config.py), and the options of requests (options.py)."""
