"""The layers of the served model as callables.

A shallow copy of the decoder body with another `start_layer` and `end_layer` shares weights, attention layers and KV
pages (`layers.py`). A body can be cut where it runs `layers` in order and then `norm`: its source says so before an
engine starts (`model_source.py`), the worker decides for classes that are not vLLM's. Where vLLM compiles the target,
each cut is compiled with a class, a method and a tag of its own, because vLLM's code and its cache on disk go by these
(`compiled.py`). Which targets are refused: `admission.py`; the target's own end, for what learns: `end.py`.
"""
