"""In the process in which requests come in: the entry point, vLLM's configuration with ours in it, options of requests.

`plugin.py` is what vLLM loads, `spec_config.py` carries our configuration into every process, `scheduling.py` chooses
the scheduler, `options.py` resolves and checks what requests ask for.
"""
