"""Contains the code of the process that receives requests: the entry point (plugin.py), vLLM's configuration with the
plugin's configuration (spec_config.py), and the options of requests (options.py)."""
