"""The layers of the served model as callables (`layers.py`), compiled where vLLM compiles the target (`compiled.py`).
Before an engine starts, `model_source.py` reads in vLLM's source whether a body can be cut, because it runs `layers` in
order and then `norm`. `admission.py` refuses other targets."""
