"""The layers of the served model as callables.

A shallow copy of the decoder body with another `start_layer` and `end_layer` shares weights, attention layers and KV
pages (`layers.py`). A body can be cut where it runs `layers` in order and then `norm`: `model_source.py` reads this
from vLLM's source before an engine starts. Where vLLM compiles the target, `compiled.py` compiles each cut.
`admission.py` refuses targets.
"""
