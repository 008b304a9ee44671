"""The layers of the served model as callables (`layers.py`), compiled where vLLM compiles the target (`compiled.py`).
Before an engine starts, `model_source.py` reads from vLLM's source whether a body runs `layers` in order and then
`norm`, so that it can be cut, and `admission.py` refuses other targets."""
