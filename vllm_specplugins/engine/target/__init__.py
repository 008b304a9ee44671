"""Runs the layers of the served model as callables (`layers.py`), compiled if vLLM compiles the target (`compiled.py`).
Before an engine starts, `model_source.py` reads vLLM's source to find whether a body can be cut, which requires that it
runs `layers` in order and then `norm`. `admission.py` refuses other targets."""
